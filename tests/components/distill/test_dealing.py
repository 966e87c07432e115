"""Who is trained on next: rounds that deal everybody, rollouts in the asked share, and their health."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflux.components.algorithms.rollouts import Rollout
from reflux.components.distill.dealing import Deck, own_rollouts
from reflux.components.distill.own_answers import rollout_health

NAMES = ["a", "b", "b", "c", "d"]  # b is a hard sample


def test_every_round_deals_every_name_as_often_as_it_is_listed() -> None:
    dealt = Deck(NAMES, seed=0).deal(5 * 20)
    rounds = [dealt[i : i + 5] for i in range(0, 100, 5)]
    assert {tuple(sorted(one)) for one in rounds} == {tuple(NAMES)}
    assert len({tuple(one) for one in rounds}) > 10  # shuffled anew each time


@given(st.lists(st.integers(0, 7), min_size=1, max_size=10))
def test_what_is_dealt_does_not_depend_on_how_many_at_once(counts: list[int]) -> None:
    deck = Deck(NAMES, seed=3)
    assert [name for count in counts for name in deck.deal(count)] == Deck(NAMES, seed=3).deal(sum(counts))


@given(before=st.integers(0, 12), after=st.integers(0, 12))
def test_a_restored_deck_goes_on_where_the_saved_one_stood(before: int, after: int) -> None:
    deck, other = Deck(NAMES, seed=1), Deck(NAMES, seed=99)
    deck.deal(before)
    other.restore(deck.state())
    assert other.deal(after) == deck.deal(after)


def test_a_saved_state_is_not_moved_by_the_deck_it_came_from() -> None:
    deck = Deck(NAMES, seed=1)
    deck.deal(2)
    state = deck.state()
    first = deck.deal(20)
    deck.restore(state)
    assert deck.deal(20) == first


@given(batch=st.integers(1, 32), share=st.floats(0, 1))
def test_the_share_of_rollouts_is_exact_over_the_steps(batch: int, share: float) -> None:
    own = [own_rollouts(step, batch, share) for step in range(50)]
    assert all(0 <= count <= batch for count in own)
    assert abs(sum(own) - 50 * batch * share) <= 0.5
    assert max(own) - min(own) <= 1


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, {0: 8}), (1.0, {5: 8}), (0.5, {2: 4, 3: 4}), (0.1, {0: 4, 1: 4})]
)
def test_half_of_an_odd_batch_alternates(share: float, expected: dict[int, int]) -> None:
    assert Counter(own_rollouts(step, 5, share) for step in range(8)) == expected


def test_health_counts_lengths_budgets_and_loops() -> None:
    answers = [
        Rollout(prompt_token_ids=[1], response_token_ids=[5, 6, 7, 2], stop_reason="eos"),
        Rollout(prompt_token_ids=[1], response_token_ids=[4, 4, 4, 4, 4, 4], stop_reason="length"),
    ]
    assert rollout_health(answers) == {
        "rollout_tokens": 5.0, "rollout_budget_exhausted": 0.5, "rollout_loop_rate": 0.5,
    }  # fmt: skip
