"""What a decoded token costs: its time, and within it the time at the KV cache, with and without the profiler itself.

An answer is fed token by token as it was given. A round decodes it twice, once bare and once with every update and
read of the cache timed; the order alternates, so that a machine that warms up or slows down does so for both. The bare
decode gives the latency, the other the cost of the cache, and their difference is what the profiler costs.

Shapes: R rounds, T tokens of the answer.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reflux.components.algorithms.attention_watch import intercepted_attention
from reflux.components.algorithms.slot_cache import cache_argument

from .clocks import clock_for

WARMUP_TOKENS = 10
"""Decoded before the first that is timed."""


@dataclass(frozen=True, kw_only=True)
class DecodeCost:
    """Of one trace. Times in microseconds; update and read are sums over all layers."""

    trace_id: str
    first_position: int
    """Of the answer's first token in the sequence."""
    kv_bytes: list[int]
    """[T] of K and V held for all layers when the token attends."""
    bare_us_RT: Tensor
    profiled_us_RT: Tensor
    update_us_RT: Tensor
    read_us_RT: Tensor
    """The attention over the cache: it reads all K and V, and its arithmetic is not apart from that."""

    def access_us(self) -> Tensor:
        """[R, T] update and read: c_t."""
        return self.update_us_RT + self.read_us_RT


class AccessTimer:
    """Marks around every update and read of the cache; differences are taken after the decode, not during it."""

    def __init__(self, clock: Any) -> None:
        self.mark = clock.mark
        self.updates: list[tuple[Any, Any]] = []
        self.reads: list[tuple[Any, Any]] = []

    @contextmanager
    def timing(self, model: Any, cache: Any) -> Iterator[None]:
        """Within the block, accesses to this cache by this model are marked."""
        cache.update = functools.partial(self._timed, self.updates, cache.update)
        try:
            with intercepted_attention(model, functools.partial(self._timed, self.reads)):
                yield
        finally:
            del cache.update

    def _timed(self, marks: list[tuple[Any, Any]], call: Any, *args: Any, **options: Any) -> Any:
        begin = self.mark()
        result = call(*args, **options)
        marks.append((begin, self.mark()))
        return result


@torch.no_grad()
def decode_cost(
    model: Any, trace_id: str, prompt: list[int], response: list[int], *, rounds: int, warm_up: bool
) -> DecodeCost:
    """Decode one answer `rounds` times bare and as often profiled, on the device that holds the model."""
    device = next(model.parameters()).device
    clock = clock_for(device)
    prompted = getattr(model(**_inputs(prompt, 0, device), use_cache=True, logits_to_keep=1), cache_argument(model))
    if warm_up:
        _decode(model, copy.deepcopy(prompted), response[:WARMUP_TOKENS], len(prompt), clock)
    bare, profiled, updates, reads = [], [], [], []
    kv_bytes: list[int] = []
    for number in range(rounds):
        for profiling in (False, True) if number % 2 == 0 else (True, False):
            cache = copy.deepcopy(prompted)
            if not profiling:
                bare_us, kv_bytes = _decode(model, cache, response, len(prompt), clock)
                bare.append(bare_us)
                continue
            timer = AccessTimer(clock)
            with timer.timing(model, cache):
                profiled.append(_decode(model, cache, response, len(prompt), clock)[0])
            spent_us = clock.durations_us(timer.updates + timer.reads)
            updates.append(_by_token(spent_us[: len(timer.updates)], len(response)))
            reads.append(_by_token(spent_us[len(timer.updates) :], len(response)))
    return DecodeCost(
        trace_id=trace_id,
        first_position=len(prompt),
        kv_bytes=kv_bytes,
        bare_us_RT=torch.tensor(bare, dtype=torch.float64),
        profiled_us_RT=torch.tensor(profiled, dtype=torch.float64),
        update_us_RT=torch.stack(updates),
        read_us_RT=torch.stack(reads),
    )


def _decode(model: Any, cache: Any, response: list[int], position: int, clock: Any) -> tuple[list[float], list[int]]:
    """Microseconds of each token, the device waited for, and bytes that the cache holds after it."""
    spent_us, held_bytes = [], []
    device = next(model.parameters()).device
    inputs = [_inputs([token], position + offset, device) for offset, token in enumerate(response)]
    clock.wait()
    for of_token in inputs:
        begin = time.perf_counter_ns()
        model(**of_token, **{cache_argument(model): cache}, use_cache=True, logits_to_keep=1)
        clock.wait()
        spent_us.append((time.perf_counter_ns() - begin) / 1000)
        held_bytes.append(sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers))
    return spent_us, held_bytes


def _by_token(durations_us: list[float], tokens: int) -> Tensor:
    """[T] sums over the layers, which take their turns once a token."""
    return torch.tensor(durations_us, dtype=torch.float64).reshape(tokens, -1).sum(-1)


def _inputs(token_ids: list[int], position: int, device: torch.device) -> dict[str, Tensor]:
    input_BT = torch.tensor([token_ids], device=device)
    position_BT = torch.arange(position, position + len(token_ids), device=device)[None]
    return {"input_ids": input_BT, "position_ids": position_BT}
