"""Answers that end in a loop: by example, and against a literal search."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflux.components.algorithms.loops import ends_in_loop


@pytest.mark.parametrize(
    ("token_ids", "loops"),
    [
        ([], False),
        ([1, 1], False),
        ([1, 1, 1], True),
        ([9, 8, 1, 2, 1, 2, 1, 2], True),
        ([1, 2, 1, 2, 1, 2, 3], False),  # it got out again
        ([1, 2, 1, 2], False),
        ([7, *[*range(16)] * 3], True),
        ([*range(17)] * 3, False),  # longer than a phrase
        ([*range(60)], False),
    ],
)
def test_a_loop_is_a_phrase_three_times_at_the_end(token_ids: list[int], loops: bool) -> None:
    assert ends_in_loop(token_ids) == loops


@given(st.lists(st.integers(0, 1), max_size=60))
def test_loops_are_those_of_a_literal_search(token_ids: list[int]) -> None:
    def repeats(period: int) -> bool:
        last = token_ids[-3 * period :]
        phrases = [last[i : i + period] for i in range(0, 3 * period, period)]
        return len(last) == 3 * period and all(a == b for a, b in pairwise(phrases))

    assert ends_in_loop(token_ids) == any(repeats(period) for period in range(1, 17))
