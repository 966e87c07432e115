"""Which prompts are asked: how many of each dimension, the same ones whatever stands around them, on both sides."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux.components.collect_traces.choice import DIMENSIONS, chosen_prompts, composition, share_metrics
from reflux.components.collect_traces.prompts import Prompt, split_of


def prompt(prompt_id: str, dimension: str, heldout_fraction: float = 0.2) -> Prompt:
    return Prompt(
        prompt_id=prompt_id, dimension=dimension, text=prompt_id, token_ids=[1],
        split=split_of(prompt_id, heldout_fraction),
    )  # fmt: skip


MANY = [prompt(f"{dimension}-{i}", dimension) for dimension in (*DIMENSIONS, "trivial") for i in range(300)]


def ids(prompts: list[Prompt]) -> list[str]:
    return [one.prompt_id for one in prompts]


def choose(prompts: list[Prompt], per_dimension: int, heldout_fraction: float = 0.2) -> list[Prompt]:
    return chosen_prompts(prompts, per_dimension=per_dimension, trivial_share=0.1, heldout_fraction=heldout_fraction)


def test_each_dimension_has_its_count_its_split_and_a_tenth_is_trivial() -> None:
    chosen = choose(MANY, 180)
    counts = Counter((one.dimension, one.split) for one in chosen)
    for dimension in DIMENSIONS:
        assert (counts[dimension, "train"], counts[dimension, "heldout"]) == (144, 36)
    assert (counts["trivial", "train"], counts["trivial", "heldout"]) == (80, 20)
    assert ids(chosen) == [one.prompt_id for one in MANY if one.prompt_id in set(ids(chosen))]


def test_all_are_asked_by_default() -> None:
    assert choose(MANY, 0) == MANY


def test_a_dimension_with_too_few_gives_what_it_has() -> None:
    few = [one for one in MANY if one.dimension == "tool_use"][:30]
    others = [one for one in MANY if one.dimension == "multi_hop"]
    counts = Counter(one.dimension for one in choose([*few, *others], 50))
    assert counts == {"tool_use": 30, "multi_hop": 50}


def test_where_one_side_has_too_few_the_other_fills_up() -> None:
    heldout = [one for one in MANY if one.dimension == "tool_use" and one.split == "heldout"][:2]
    train = [one for one in MANY if one.dimension == "tool_use" and one.split == "train"]
    assert Counter(one.split for one in choose([*heldout, *train], 20)) == {"train": 18, "heldout": 2}
    assert Counter(one.split for one in choose([*heldout, *train[:3]], 20)) == {"train": 3, "heldout": 2}


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60), st.sampled_from([0.05, 0.2, 0.5, 0.9]))
def test_neither_order_nor_other_dimensions_matter_and_asking_for_more_keeps_what_was_chosen(
    seed: int, per_dimension: int, heldout_fraction: float
) -> None:
    prompts = [
        prompt(f"{i}", random.Random(seed + i).choice(["a", "b", "trivial"]), heldout_fraction) for i in range(200)
    ]
    chosen = set(ids(choose(prompts, per_dimension, heldout_fraction)))
    shuffled = random.Random(seed).sample(prompts, len(prompts))
    assert set(ids(choose(shuffled, per_dimension, heldout_fraction))) == chosen
    alone = [one for one in prompts if one.dimension == "a"]
    assert set(ids(choose(alone, per_dimension, heldout_fraction))) == chosen & set(ids(alone))
    assert chosen <= set(ids(choose(prompts, per_dimension + 1, heldout_fraction)))


def test_the_composition_adds_up() -> None:
    rows = composition(MANY, choose(MANY, 18))
    assert [row["dimension"] for row in rows] == sorted([*DIMENSIONS, "trivial"])
    assert {row["usable"] for row in rows} == {300}
    assert {row["dimension"]: (row["asked"], row["heldout"]) for row in rows}["multi_hop"] == (18, 4)
    shares = share_metrics(rows)
    assert shares["share_trivial"] == pytest.approx(0.1)
    assert shares["share_other"] == 0
    assert sum(shares.values()) == pytest.approx(1)
    named = share_metrics(composition([prompt("x", "our own, 100 %")], [prompt("x", "our own, 100 %")]))
    assert named["share_other"] == 1
