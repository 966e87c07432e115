"""What went on inside a teacher that runs here: its KV states at decisions, and what its answer's tokens looked at.

Both are read off one forward over the finished answer, cut to `capture_max_tokens` beforehand, so that a long answer
costs no more than a full window and shapes do not change later. One sequence at a time, without padding: what is stored
of a trace does not depend on its batch.

Shapes: H KV heads, d channels of a head, W tokens of the window, L tokens of the cut sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reflux.components.algorithms.attention_rows import SparseAttention, sparse_attention
from reflux.components.algorithms.attention_watch import intercepted_attention, require_plain
from reflux.components.algorithms.low_bit import decoder_layers
from reflux.components.algorithms.slot_cache import cache_argument
from reflux.components.collect_traces.config import CollectTracesConfig

MASKS_UNDERSTOOD = ("sdpa", "eager")
"""Attention implementations whose mask is None, bool or additive."""


@dataclass(frozen=True, kw_only=True)
class KvState:
    """The cache of one layer just before a decision: the first token of a reasoning step."""

    layer: int
    step: int
    position: int
    """Index of the decision's token in the response."""
    window_tokens: int
    """Tokens in the window, fewer than its size only near the start."""
    state: Tensor
    """float16, K and V side by side: [H, 2d] mean over the window, or [W, H, 2d] oldest token first."""


@dataclass(frozen=True, kw_only=True)
class Captured:
    states: list[KvState]
    """By layer, then step."""
    attention: dict[int, SparseAttention]
    """Layer -> one row per response token within the cut; positions count from the prompt's first token."""


def wanted(config: CollectTracesConfig) -> bool:
    return bool(config.state_layers or config.attention_layers)


def require_layers(model: Any, config: CollectTracesConfig) -> None:
    """ValueError if the model has no such layer, or computes attention in a way that is not understood here."""
    layers = model.config.num_hidden_layers
    for name in ("state_layers", "attention_layers"):
        if beyond := [layer for layer in getattr(config, name) if layer >= layers]:
            raise ValueError(f"collect_traces.{name} {beyond}: the teacher has layers 0 to {layers - 1}")
    if config.attention_layers and model.config._attn_implementation not in MASKS_UNDERSTOOD:
        raise ValueError(
            f"collect_traces.attention_layers: the teacher runs with {model.config._attn_implementation!r} attention, "
            f"whose masks are not understood; allowed are {', '.join(MASKS_UNDERSTOOD)}"
        )


@torch.no_grad()
def capture(
    model: Any, prompt: list[int], response: list[int], step_starts: list[int], config: CollectTracesConfig
) -> Captured:
    """What the configuration asks for of one answer. Decisions and tokens beyond the cut are left out."""
    device = next(model.parameters()).device
    token_ids = (prompt + response)[: config.capture_max_tokens]
    rows = torch.arange(len(prompt), len(token_ids), device=device)
    input_BT = torch.tensor([token_ids], device=device)
    with _watched(model, config.attention_layers if len(rows) else [], rows, config.attention_top) as attention:
        output = model(input_ids=input_BT, use_cache=True, logits_to_keep=1)
    cache = getattr(output, cache_argument(model)).layers
    decisions = [
        (step, start)
        for step, start in enumerate(step_starts[: config.state_steps])
        if len(prompt) + start < len(token_ids)
    ]
    return Captured(
        states=[
            _state(cache[layer], layer, step, start, len(prompt) + start, config)
            for layer in config.state_layers
            for step, start in decisions
        ],
        attention=attention,
    )


def _state(held: Any, layer: int, step: int, start: int, end: int, config: CollectTracesConfig) -> KvState:
    if held.keys.shape[-2] < end:
        raise ValueError(
            f"collect_traces.state_layers {layer}: this layer keeps only its last {held.keys.shape[-2]} tokens (it has "
            "a sliding window); choose one with full attention"
        )
    window = slice(max(0, end - config.state_window), end)
    key_HWd, value_HWd = held.keys[0, :, window], held.values[0, :, window]
    state_WHd = torch.cat([key_HWd, value_HWd], dim=-1).transpose(0, 1).float().clone()
    state = (state_WHd.mean(0) if config.state_pooling == "head" else state_WHd).half().cpu()
    if not state.isfinite().all():
        raise FloatingPointError(f"layer {layer}: keys or values of step {step} do not fit float16")
    return KvState(layer=layer, step=step, position=start, window_tokens=len(state_WHd), state=state)


@contextmanager
def _watched(model: Any, layers: list[int], rows: Tensor, top: int) -> Iterator[dict[int, SparseAttention]]:
    """Filled during a forward over one sequence with what the chosen rows look at, by layer."""
    seen: dict[int, SparseAttention] = {}
    if not layers:
        yield seen
        return
    chosen = {decoder_layers(model)[layer].self_attn: layer for layer in layers}

    def intercept(
        attend: Callable[..., Any], module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> Any:
        if module in chosen:
            require_plain(module, options)
            mask_LL = None if mask is None else mask[0, 0]
            scaling = options["scaling"]
            seen[chosen[module]] = sparse_attention(query[0], key[0], rows, top, scaling=scaling, mask_TT=mask_LL)
        return attend(module, query, key, value, mask, **options)

    with intercepted_attention(model, intercept):
        yield seen
    if missing := sorted(set(layers) - seen.keys()):
        raise ValueError(f"collect_traces.attention_layers {missing}: the teacher's attention was not seen there")
