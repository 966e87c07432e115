"""How much each generated token carries the decision: the score that key-token losses and curricula weigh by.

Strategies are independent views on one token, each in [0, 1]; a score is their weighted mean. Those here need the
next-token distribution alone; views on attention join the same dict.

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known about N tokens when they are chosen."""

    logits_NV: Tensor
    entropy_nats_N: Tensor
    """Of softmax(logits)."""
    temperature: float = 1.0
    """Divides the logits before confidence is read off them: large models are over-confident at 1."""


def confidence(evidence: Evidence) -> Tensor:
    """[N] |2 p - 1| for the likeliest token's probability p: 1 where the model is certain or lost, 0 at p = 1/2."""
    logits_NV = evidence.logits_NV.float() / evidence.temperature
    likeliest_N = (logits_NV.amax(-1) - logits_NV.logsumexp(-1)).exp()
    return (2 * likeliest_N - 1).abs()


def entropy(evidence: Evidence) -> Tensor:
    """[N] 1 - exp(-H) = 1 - 1/perplexity: 0 where one token is certain, 0.5 for two equal choices, 0.75 for four."""
    return 1 - torch.exp(-evidence.entropy_nats_N)


STRATEGIES: dict[str, Callable[[Evidence], Tensor]] = {"confidence": confidence, "entropy": entropy}


def key_token_score(evidence: Evidence, strategies: Sequence[str], weights: Sequence[float]) -> Tensor:
    """[N] in [0, 1], the mean of the named strategies by weight. ValueError as in `check_strategies`."""
    check_strategies(strategies, weights)
    total = sum(weights)
    parts = [STRATEGIES[name](evidence) * (weight / total) for name, weight in zip(strategies, weights, strict=True)]
    return torch.stack(parts).sum(0).clamp(0, 1)


def check_strategies(strategies: Sequence[str], weights: Sequence[float]) -> None:
    """ValueError for an unknown strategy, none at all, or weights that do not fit."""
    unknown = [name for name in strategies if name not in STRATEGIES]
    if unknown or not strategies:
        raise ValueError(f"key-token strategies {list(strategies)}: allowed are one or more of {sorted(STRATEGIES)}")
    if len(weights) != len(strategies):
        raise ValueError(f"key-token weights {list(weights)}: one is needed for each of {list(strategies)}")
    if not all(0 <= weight < float("inf") for weight in weights) or sum(weights) == 0:
        raise ValueError(f"key-token weights {list(weights)}: must be >= 0 with a positive sum")
