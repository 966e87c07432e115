"""The gap closed: its arithmetic, its interval, and what it says when there is no gap."""

from __future__ import annotations

import numpy as np
import pytest

from reflux.components.algorithms.gap_closed import gap_closed, gap_closed_with_interval


def test_arithmetic():
    assert gap_closed(4.0, 3.4, 3.0) == pytest.approx(0.6)
    assert gap_closed(4.0, 4.0, 3.0) == 0.0
    assert gap_closed(4.0, 3.0, 3.0) == 1.0
    assert gap_closed(4.0, 4.5, 3.0) == pytest.approx(-0.5)  # training made it worse
    assert gap_closed(3.0, 2.9, 3.0) is None


def test_the_value_is_per_token_not_per_unit():
    tokens = np.array([10, 1000])
    closed = gap_closed_with_interval(tokens * 4.0, tokens * np.array([4.0, 3.0]), tokens * 3.0, tokens, seed=0)
    assert closed.value == pytest.approx(1000 / 1010)


def test_pairing_makes_the_interval_narrow():
    """Units that differ fifty-fold in difficulty, but all gain alike: the gain is certain."""
    rng = np.random.default_rng(0)
    tokens = np.full(30, 100)
    full = rng.uniform(10, 500, 30)
    closed = gap_closed_with_interval(full + 100, full + 50, full, tokens, seed=1)
    assert closed.value == pytest.approx(0.5)
    assert closed.low == pytest.approx(0.5)
    assert closed.high == pytest.approx(0.5)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(2)
    hits = 0
    for trial in range(100):
        gain = rng.normal(0.4, 0.1, 25)
        closed = gap_closed_with_interval(
            np.full(25, 2.0), 2.0 - gain, np.ones(25), np.ones(25), seed=trial, resamples=500
        )
        assert closed.low is not None
        assert closed.high is not None
        hits += closed.low <= 0.4 <= closed.high
    assert 85 <= hits <= 99


def test_no_interval_where_a_resample_has_no_gap():
    before, full = np.array([2.0, 0.9]), np.array([1.0, 1.0])
    closed = gap_closed_with_interval(before, full, full, np.ones(2), seed=0)
    assert closed.value == pytest.approx(1.0)
    assert closed.low is None
    assert closed.high is None


def test_equal_seeds_give_equal_intervals():
    rng = np.random.default_rng(3)
    before, after, full = rng.uniform(3, 4, 10), rng.uniform(2, 3, 10), rng.uniform(1, 2, 10)
    first, again = (gap_closed_with_interval(before, after, full, np.ones(10), seed=7) for _ in range(2))
    assert first == again
