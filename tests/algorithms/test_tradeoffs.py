"""Fronts against trying every pair, knees of fronts that can be drawn, ranks against scipy."""

from __future__ import annotations

import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux.components.algorithms.tradeoffs import knee, pareto_front, rank_correlation, simplex

points = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12)


def test_the_grid_is_every_mixture_in_tenths() -> None:
    grid = simplex(10)
    assert len(set(grid)) == len(grid) == 66
    assert grid[0] == (1, 0, 0)
    assert grid[-1] == (0, 0, 1)
    assert all(sum(round(10 * weight) for weight in mixture) == 10 and min(mixture) >= 0 for mixture in grid)


@settings(deadline=None)
@given(points)
def test_the_front_is_what_nothing_beats(aims: list[tuple[int, int]]) -> None:
    front = pareto_front(torch.tensor(aims).double()).tolist()
    for (x, y), on_front in zip(aims, front, strict=True):
        assert on_front == (not any(u >= x and v >= y and (u, v) != (x, y) for u, v in aims))


@settings(deadline=None)
@given(points)
def test_the_knee_lies_on_the_front(aims: list[tuple[int, int]]) -> None:
    aims_NK = torch.tensor(aims).double()
    assert pareto_front(aims_NK)[knee(aims_NK)]


def test_the_knee_is_where_a_little_more_of_one_begins_to_cost_much_of_the_other() -> None:
    aims_NK = torch.tensor([[0.0, 10.0], [0.1, 9.9], [0.8, 9.0], [0.9, 5.0], [1.0, 0.0], [0.7, 8.0]]).double()
    assert knee(aims_NK) == 2
    assert knee(aims_NK * torch.tensor([1000.0, 0.01]) - 3) == 2  # units do not matter


def test_of_a_front_of_two_the_first_is_taken_and_one_is_its_own_knee() -> None:
    assert knee(torch.tensor([[0.5, 0.5], [0.0, 1.0], [1.0, 0.0]]).double()) == 0
    assert knee(torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0]]).double()) == 1
    assert knee(torch.tensor([[0.3, 0.3], [0.4, 0.5]]).double()) == 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-3, 3)), min_size=2, max_size=20))
def test_rank_correlation_is_spearmans(pairs: list[tuple[int, int]]) -> None:
    x, y = zip(*pairs, strict=True)
    ours = rank_correlation(torch.tensor(x).double(), torch.tensor(y).double())
    if len(set(x)) == 1 or len(set(y)) == 1:
        assert ours == 0
    else:
        assert ours == pytest.approx(scipy.stats.spearmanr(x, y).statistic, abs=1e-12)
