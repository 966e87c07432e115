"""Everything measured on one model: text, held-out answers, layers, generations, latency.

Models are measured one after another, so what later ones are compared with is kept small: the teacher's final hidden
states of the held-out decisions (its logits would be a thousand times larger) and the reference's layer outputs on one
batch. Shapes: B batch, T tokens, D hidden, N decisions of a batch, L layers, W windows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from reflux.components.algorithms.divergences import score_tokens
from reflux.components.algorithms.draws import Sampling
from reflux.components.algorithms.hadamard import in_common_basis
from reflux.components.algorithms.low_bit import decoder_layers
from reflux.components.algorithms.not_finite import require_finite
from reflux.components.algorithms.outlier_capture import watching_capture
from reflux.components.algorithms.output_head import OutputHead, final_hidden_states
from reflux.components.algorithms.rollouts import Request, rollout

from .heldout import Batch, Trace

WARM_UP_TOKENS = 10
"""Decoded before the clock counts: the first steps allocate."""


@dataclass(frozen=True, kw_only=True)
class TraceScore:
    trace_id: str
    tokens: int
    nll_nats: float
    jsd_bits: float
    """Both summed over the response."""


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """How a model sees the held-out traces, kept after the model itself is gone."""

    head: OutputHead
    hidden: list[Tensor]
    """[N, D] final hidden states of every batch."""
    layer_outputs: list[Tensor]
    """[N, D] of every layer, first batch only."""
    outlier_capture: float | None
    """Share of true outliers on the outlier grid, first batch only; None without two grids."""


@torch.no_grad()
def text_nats(
    model: Any, head: OutputHead, window_WT: Tensor, vocab_size: int, *, who: str = "evaluate"
) -> list[float]:
    """Summed nats of each window's tokens but the first. ValueError of `who` that names the place where the model's
    numbers stop being finite.
    """
    nats = []
    for number, window_T in enumerate(window_WT):
        input_BT = window_T[None]
        forward = partial(
            final_hidden_states, model, input_BT, torch.ones_like(input_BT), torch.arange(len(window_T))[None]
        )
        nll_N, _ = score_tokens(forward()[0, :-1], window_T[1:], head, vocab_size)
        total = nll_N.sum()
        require_finite(total, who, [f"window {number} of the text"], model, forward)
        nats.append(float(total))
    return nats


@torch.no_grad()
def decisions(
    model: Any,
    head: OutputHead,
    batches: list[Batch],
    *,
    who: str = "evaluate",
    site_bits: Mapping[str, int] = MappingProxyType({}),
) -> Decisions:
    """One forward over the held-out traces; `site_bits` are those of sites with two grids. ValueError as in
    `text_nats`.
    """
    hidden: list[Tensor] = []
    layers: list[Tensor] = []
    captured: list[Tensor] = []
    for index, batch in enumerate(batches):
        forward = partial(final_hidden_states, model, batch.input_BT, batch.mask_BT, batch.position_BT)
        watching: AbstractContextManager[list[Tensor]] = nullcontext(captured)
        if site_bits and index == 0:
            row_N, column_N = batch.decision_BT.nonzero().unbind(-1)
            watching = watching_capture(model, site_bits, row_N, column_N)
        with _layer_outputs(model, batch.decision_BT, layers if index == 0 else None), watching as found:
            hidden_BTD = forward()
        captured = found
        names = [f"trace {trace.trace_id}" for trace in batch.traces]
        hidden.append(hidden_BTD[batch.decision_BT])
        require_finite(hidden[-1], who, names, model, forward, batch.mask_BT)
    capture = torch.cat(captured).mean().item() if captured else None
    return Decisions(head=head, hidden=hidden, layer_outputs=layers, outlier_capture=capture)


@torch.no_grad()
def trace_scores(batches: list[Batch], own: Decisions, teacher: Decisions, vocab_size: int) -> list[TraceScore]:
    """Likelihood and divergence from the teacher, trace by trace in order of trace_id."""
    scores = []
    for batch, hidden_ND, teacher_ND in zip(batches, own.hidden, teacher.hidden, strict=True):
        against = None if own is teacher else (teacher_ND, teacher.head)
        nll_N, jsd_N = score_tokens(hidden_ND, batch.target_N, own.head, vocab_size, teacher=against)
        for trace, nll, jsd in zip(batch.traces, batch.split(nll_N), batch.split(jsd_N), strict=True):
            scores.append(
                TraceScore(
                    trace_id=trace.trace_id, tokens=len(nll), nll_nats=float(nll.sum()), jsd_bits=float(jsd.sum())
                )
            )
    return sorted(scores, key=lambda score: score.trace_id)


def layer_errors(own: Decisions, reference: Decisions) -> list[float]:
    """|h - h_ref| / |h_ref| of every layer's output, mean over the first batch's decisions."""
    return [
        float(((h_ND - ref_ND).float().norm(dim=-1) / ref_ND.float().norm(dim=-1)).mean())
        for h_ND, ref_ND in zip(own.layer_outputs, reference.layer_outputs, strict=True)
    ]


def generate(model: Any, tokenizer: Any, prompts: list[Trace], max_tokens: int) -> list[str]:
    """The model's most likely answer to each prompt, decoded."""
    rollouts = rollout(
        model,
        [Request(prompt_token_ids=trace.prompt_token_ids, seed=0) for trace in prompts],
        Sampling(temperature=0.0, max_new_tokens=max_tokens),
        eos_token_id=tokenizer.eos_token_id,
        vocab_size=len(tokenizer),
    )
    return [tokenizer.decode(answer.response_token_ids, skip_special_tokens=True) for answer in rollouts]


def decode_times_ms(model: Any, tokenizer: Any, prompt_token_ids: list[int], tokens: int) -> list[float]:
    """Milliseconds of each of `tokens` greedy decoding steps with a KV cache at batch 1, prefill and warm-up left out.

    The answer goes on past EOS. Needs room for WARM_UP_TOKENS + tokens + 1 after the prompt in the model's context.
    """
    clock_ns: list[int] = []
    rollout(
        model,
        [Request(prompt_token_ids=prompt_token_ids, seed=0)],
        Sampling(temperature=0.0, max_new_tokens=WARM_UP_TOKENS + tokens + 1),
        eos_token_id=-1,
        vocab_size=len(tokenizer),
        on_step=lambda rows, logits_BV: clock_ns.append(time.perf_counter_ns()),
    )
    steps_ms = [(after - before) / 1e6 for before, after in pairwise(clock_ns)]
    return steps_ms[WARM_UP_TOKENS:]


def pad_token(tokenizer: Any) -> int:
    """What rows are filled up with; masked, so any token will do."""
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


@contextmanager
def _layer_outputs(model: Any, kept_BT: Tensor, into: list[Tensor] | None) -> Iterator[None]:
    """While in the block, append each decoder layer's output at the kept tokens; None leaves the model alone.

    `output_hidden_states` would give the last layer after the final norm.
    """

    def keep(module: Any, args: Any, output: Any) -> None:
        assert into is not None
        into.append(in_common_basis(model, (output[0] if isinstance(output, tuple) else output)[kept_BT]))

    hooks = [] if into is None else [layer.register_forward_hook(keep) for layer in decoder_layers(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
