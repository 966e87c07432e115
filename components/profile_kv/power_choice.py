"""Which coefficients of compute power to take: all on a grid are tried against what was measured and what matters.

Two aims: that P orders the decoded tokens of an answer as their measured latency does, and that it orders the tokens of
an answer by importance, for which the teacher's entropy stands. Ranks, because neither aim fixes a scale. What nothing
beats in both is the Pareto front; its knee is taken unless the configuration gives coefficients.

Shapes: B sequences, N tokens of prompt and answer, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reflux.components.algorithms.power import power_distribution
from reflux.components.algorithms.tradeoffs import knee, pareto_front, rank_correlation, simplex

from .power_profiles import PowerProfile, token_coefficients, token_groups

GRID_STEPS = 10
"""Coefficients are multiples of 0.1."""


@dataclass(frozen=True, kw_only=True)
class PowerData:
    """Padded on the right; NaN where a value is not known."""

    features_BNF: Tensor
    mask_BN: Tensor
    """Tokens that P is over."""
    class_BN: Tensor
    latency_us_BN: Tensor
    """Of the tokens that were decoded."""
    importance_BN: Tensor
    """Of the tokens of the answers."""

    def power(self, coefficients: Sequence[float], profile: PowerProfile) -> Tensor:
        """[B, N] P."""
        return power_distribution(
            self.features_BNF,
            self.mask_BN,
            token_coefficients(coefficients, self.class_BN, profile),
            token_groups(self.class_BN, profile),
        )


@dataclass(frozen=True, kw_only=True)
class Candidate:
    coefficients: tuple[float, ...]
    latency_correlation: float
    importance_correlation: float
    on_front: bool
    chosen: bool


def choose(data: PowerData, profile: PowerProfile, given: Sequence[float]) -> list[Candidate]:
    """Every candidate of the grid, and `given` where it is not on it; one of them is chosen."""
    grid: list[tuple[float, ...]] = [*simplex(GRID_STEPS)]
    if given and tuple(given) not in grid:
        grid.append(tuple(given))
    powers = [data.power(coefficients, profile) for coefficients in grid]
    aims_N2 = torch.tensor(
        [[_agreement(power_BN, data.latency_us_BN), _agreement(power_BN, data.importance_BN)] for power_BN in powers],
        dtype=torch.float64,
    )
    front = pareto_front(aims_N2).tolist()
    chosen = grid.index(tuple(given)) if given else knee(aims_N2)
    return [
        Candidate(
            coefficients=coefficients,
            latency_correlation=latency,
            importance_correlation=importance,
            on_front=front[number],
            chosen=number == chosen,
        )
        for number, (coefficients, (latency, importance)) in enumerate(zip(grid, aims_N2.tolist(), strict=True))
    ]


def chosen_of(candidates: list[Candidate]) -> Candidate:
    (chosen,) = (candidate for candidate in candidates if candidate.chosen)
    return chosen


def _agreement(power_BN: Tensor, wanted_BN: Tensor) -> float:
    """Mean over sequences of the rank correlation of the tokens where `wanted` is known; 0 if none has two of them."""
    correlations = []
    for power_N, wanted_N in zip(power_BN, wanted_BN, strict=True):
        known_N = ~wanted_N.isnan()
        if known_N.sum() > 1:
            correlations.append(rank_correlation(power_N[known_N], wanted_N[known_N]))
    return sum(correlations) / len(correlations) if correlations else 0.0
