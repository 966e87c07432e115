"""Answers sampled from a causal language model by continuous batching: the teacher's traces and the student's own
rollouts.

Written out instead of `generate` because distillation needs the logits of every step as they were before temperature
and top_p, draws that do not depend on what else is in the batch, and no work for finished rows: a finished sequence's
slot goes to the next request at once. Sequences of different length stand side by side without padding
(`slot_cache.py`), and the prompt that several requests share is read once.

Shapes: B sequences being answered, T tokens, V tokens of the tokenizer, P rows of the embedding (padding included).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .draws import Sampling, draw
from .kv_cache import form_in_use
from .slot_cache import SlotCache, cache_argument

PREFILL_TOKENS = 1024
"""Prompt tokens, padding included, that are read in one forward: enough to fill the matrix products."""

OnStep = Callable[[list[int], Tensor], None]


@dataclass(frozen=True, kw_only=True)
class Request:
    prompt_token_ids: list[int]
    """After the chat template."""
    seed: int
    """Of this answer's random numbers, which depend on nothing else."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    prompt_token_ids: list[int]
    response_token_ids: list[int]
    """With the closing EOS where the model wrote one."""
    stop_reason: str
    """"eos" or "length"."""


Engine = Callable[[Sequence[Request], Sampling], list[Rollout]]
"""Answers each request, in their order, with the model as it stands at the call. Equal requests to an equal model give
equal answers, or a run could not be resumed.
"""


@dataclass(kw_only=True)
class _Active:
    """A sequence in its slot."""

    row: int
    """Of the request."""
    prompt: list[int]
    generator: torch.Generator
    response: list[int] = field(default_factory=list)

    @property
    def last_token(self) -> int:
        return self.response[-1] if self.response else self.prompt[-1]

    @property
    def position(self) -> int:
        """Of the last token, whose keys and values are the first that the cache does not have."""
        return len(self.prompt) + len(self.response) - 1


@torch.no_grad()
def rollout(
    model: Any,
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    eos_token_id: int,
    vocab_size: int,
    slots: int = 0,
    on_step: OnStep | None = None,
) -> list[Rollout]:
    """Answer the requests, one answer each, in their order, with at most `slots` under way at once (0: all).

    `on_step(rows, logits_BV)` is called before every draw with the indices of the requests under way and the fp32
    logits at temperature 1 from which their next token is drawn: T times for a request with T response tokens.
    ValueError for requests that cannot be answered; FloatingPointError, naming the rows, if the model yields NaN.
    """
    _check(requests)
    if not requests:
        return []
    longest = max(len(request.prompt_token_ids) for request in requests) + sampling.max_new_tokens
    require_window(model, longest)
    size = min(slots or len(requests), len(requests))
    layers = model.config.num_hidden_layers
    cache = SlotCache(layers=layers, slots=size, capacity=longest, form=form_in_use(model))
    waiting, active = deque(range(len(requests))), list[_Active]()
    responses: dict[int, list[int]] = {}
    while active or waiting:
        if waiting and len(active) < size:
            _admit(model, cache, requests, waiting, active, size)
        logits_BV = _over_vocabulary(_decode(model, cache, active), vocab_size, active)
        if on_step is not None:
            on_step([sequence.row for sequence in active], logits_BV)
        tokens = draw(logits_BV, sampling, [sequence.generator for sequence in active]).tolist()
        for sequence, token in zip(active, tokens, strict=True):
            sequence.response.append(token)
        for slot in reversed(range(len(active))):
            if tokens[slot] == eos_token_id or len(active[slot].response) == sampling.max_new_tokens:
                responses[active[slot].row] = active[slot].response
                _vacate(cache, active, slot)
    return [
        Rollout(
            prompt_token_ids=request.prompt_token_ids,
            response_token_ids=responses[row],
            stop_reason="eos" if responses[row][-1] == eos_token_id else "length",
        )
        for row, request in enumerate(requests)
    ]


def _admit(
    model: Any,
    cache: SlotCache,
    requests: Sequence[Request],
    waiting: deque[int],
    active: list[_Active],
    size: int,
) -> None:
    """Requests into the free slots. All of a prompt but its last token is read here, or copied from a slot that has it;
    the last token is the sequence's first step of decoding.
    """
    holders = {tuple(sequence.prompt): slot for slot, sequence in enumerate(active) if cache.entries_stay}
    to_read, to_copy = list[int](), list[int]()
    while waiting and len(active) < size:
        row = waiting.popleft()
        request, slot = requests[row], len(active)
        generator = torch.Generator().manual_seed(request.seed)
        active.append(_Active(row=row, prompt=request.prompt_token_ids, generator=generator))
        if len(request.prompt_token_ids) > 1:
            known = holders.setdefault(tuple(request.prompt_token_ids), slot) != slot
            (to_copy if known else to_read).append(slot)
    for slots in _of_like_length(to_read, active):
        _read_prompts(model, cache, slots, [active[slot].prompt[:-1] for slot in slots])
    for slot in to_copy:
        prompt = active[slot].prompt
        cache.copy(holders[tuple(prompt)], slot, len(prompt) - 1)


def _of_like_length(slots: list[int], active: list[_Active]) -> list[list[int]]:
    """Batches of slots whose prompts, padded to the longest of them, have at most PREFILL_TOKENS tokens."""
    batches: list[list[int]] = []
    for slot in sorted(slots, key=lambda slot: len(active[slot].prompt), reverse=True):
        if batches and (len(batches[-1]) + 1) * len(active[batches[-1][0]].prompt) <= PREFILL_TOKENS:
            batches[-1].append(slot)
        else:
            batches.append([slot])
    return batches


def _read_prompts(model: Any, cache: SlotCache, slots: list[int], prompts: list[list[int]]) -> None:
    """Padding needs no mask: it stands on the right, where nothing before it looks, and the answer overwrites it."""
    device = next(model.parameters()).device
    longest = max(map(len, prompts))
    input_BT = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
    position_BT = torch.arange(longest, device=device).expand(len(prompts), longest)
    cache.fill(slots, [len(prompt) for prompt in prompts], device)
    model(
        input_ids=input_BT, position_ids=position_BT, logits_to_keep=1, use_cache=True, **{cache_argument(model): cache}
    )


def _decode(model: Any, cache: SlotCache, active: list[_Active]) -> Tensor:
    """[B, P] logits after each sequence's last token."""
    device = next(model.parameters()).device
    positions = [sequence.position for sequence in active]
    input_BT = torch.tensor([[sequence.last_token] for sequence in active], device=device)
    position_BT = torch.tensor([[position] for position in positions], device=device)
    mask_BT = torch.arange(max(positions) + 1, device=device) <= position_BT
    cache.decode(position_BT[:, 0], max(positions))
    return model(
        input_ids=input_BT,
        attention_mask=mask_BT,
        position_ids=position_BT,
        logits_to_keep=1,
        use_cache=True,
        **{cache_argument(model): cache},
    ).logits[:, -1]


def _vacate(cache: SlotCache, active: list[_Active], slot: int) -> None:
    """The last sequence moves into the slot of a finished one, so that those under way stay side by side."""
    last = active.pop()
    if slot < len(active):
        cache.copy(len(active), slot, last.position)
        active[slot] = last


def _over_vocabulary(logits_BP: Tensor, vocab_size: int, active: list[_Active]) -> Tensor:
    """[B, V] in fp32 without the P - V padded rows: the softmax is that of masking them to -inf."""
    if logits_BP.shape[-1] < vocab_size:
        raise ValueError(
            f"the model scores {logits_BP.shape[-1]} tokens, its tokenizer has {vocab_size}: the two do not fit"
        )
    logits_BV = logits_BP[:, :vocab_size].float()
    nan_B = logits_BV.amax(-1).isnan()
    if nan_B.any():
        broken = sorted(sequence.row for sequence, is_nan in zip(active, nan_B.tolist(), strict=True) if is_nan)
        raise FloatingPointError(f"the model's logits are NaN for rows {broken} of the batch")
    return logits_BV


def require_window(model: Any, tokens: int) -> None:
    """ValueError if a layer would not attend to all of a sequence of so many tokens: slots keep every entry."""
    window = getattr(model.config, "sliding_window", None)
    slides = any(kind != "full_attention" for kind in getattr(model.config, "layer_types", None) or [])
    if slides and not (window and tokens <= window):
        raise ValueError(
            f"prompt and answer of up to {tokens} tokens: {type(model).__name__} has layers that do not attend to all "
            f"of them (sliding_window {window}), and rollouts know full attention only"
        )


def _check(requests: Sequence[Request]) -> None:
    empty = [row for row, request in enumerate(requests) if not request.prompt_token_ids]
    if empty:
        raise ValueError(f"prompts {empty} have no tokens: an answer needs at least one")
