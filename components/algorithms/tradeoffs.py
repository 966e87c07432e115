"""Choose between things that serve two aims: every weighting on a grid, those that nothing beats, and the one to take.

Shapes: N candidates, K aims; more is better in each.
"""

from __future__ import annotations

import torch
from torch import Tensor


def simplex(steps: int) -> list[tuple[float, float, float]]:
    """All triples of multiples of 1/steps that sum to 1: (steps + 1)(steps + 2) / 2 of them, in falling order."""
    return [
        (first / steps, second / steps, (steps - first - second) / steps)
        for first in range(steps, -1, -1)
        for second in range(steps - first, -1, -1)
    ]


def pareto_front(aims_NK: Tensor) -> Tensor:
    """[N] bool: no other candidate is at least as good in every aim and better in one. Equal ones stay together."""
    at_least_NN = (aims_NK[:, None] >= aims_NK[None]).all(-1)
    better_NN = (aims_NK[:, None] > aims_NK[None]).any(-1)
    return ~(at_least_NN & better_NN).any(0)


def knee(aims_NK: Tensor) -> int:
    """The candidate on the front that gives up least: farthest beyond the chord between the front's ends, once every
    aim is stretched to [0, 1] along the front. The first in order, if several are.
    """
    front_N = pareto_front(aims_NK)
    low_K, high_K = (getattr(aims_NK[front_N], end)(0) for end in ("amin", "amax"))
    unit_NK = (aims_NK - low_K) / torch.where(high_K > low_K, high_K - low_K, torch.ones_like(low_K))
    reach_N = unit_NK.sum(-1).masked_fill(~front_N, -torch.inf)
    return int((reach_N >= reach_N.max() - 1e-12).nonzero()[0])


def rank_correlation(x_N: Tensor, y_N: Tensor) -> float:
    """Spearman's rho in [-1, 1], ties by their mean rank; 0 where one side is constant and orders nothing."""
    x_N, y_N = (_ranks(each_N) - (len(each_N) + 1) / 2 for each_N in (x_N, y_N))
    spread = (x_N.square().sum() * y_N.square().sum()).sqrt()
    return ((x_N * y_N).sum() / spread).item() if spread > 0 else 0.0


def _ranks(x_N: Tensor) -> Tensor:
    """[N] from 1, float64."""
    _, which_N, count_U = x_N.unique(return_inverse=True, return_counts=True)
    last_U = count_U.cumsum(0)
    return (last_U - (count_U - 1) / 2).double()[which_N]
