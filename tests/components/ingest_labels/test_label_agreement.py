"""Agreement of annotators against values computed by hand, its interval, and what the hard samples are made of."""

from __future__ import annotations

import itertools

import pytest

from reflux.components.ingest_labels.agreement import agreement, by_dimension
from reflux.components.ingest_labels.samples import Facts, composition, hard_samples
from reflux.components.ingest_labels.validation import Label


def label(trace: str, step: int, annotator: str, rating: int) -> Label:
    return Label(
        trace_id=trace, prompt_id=f"prompt of {trace}", step=step, annotator=annotator, rating=rating,
        overload=False, guardrail=False, comment=None,
    )  # fmt: skip


def table(ratings: dict[str, list[int | None]]) -> list[Label]:
    """One label per rating; the n-th of each annotator is of trace n // 2, step n % 2."""
    return [
        label(f"t{n // 2}", n % 2, annotator, rating)
        for annotator, row in ratings.items()
        for n, rating in enumerate(row)
        if rating is not None
    ]


KRIPPENDORFF = {  # the worked example of Krippendorff, "Computing Krippendorff's Alpha-Reliability" (2011), part C
    "a": [1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None],
    "b": [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3],
    "c": [None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None],
    "d": [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None],
}


def test_the_worked_example() -> None:
    found = agreement(table(KRIPPENDORFF))
    assert found.alpha == pytest.approx(0.815, abs=5e-4)
    assert (found.steps, found.ratings, found.annotators) == (11, 40, 4)  # the last step has one rating


def test_1_is_agreement_and_below_0_is_less_than_chance() -> None:
    assert agreement(table({"ann": [1, 2, 3, 4], "bo": [1, 2, 3, 4]})).alpha == pytest.approx(1)
    opposed = agreement(table({"ann": [1, 5, 1, 5], "bo": [5, 1, 5, 1]}))
    assert opposed.alpha == pytest.approx(-0.75)  # 1 - (n - 1) / (n / 2) for n = 8 ratings


@pytest.mark.parametrize(
    "ratings", [{}, {"ann": [1, 2, 3]}, {"ann": [3, 3], "bo": [3, 3]}, {"ann": [1], "bo": [None, 2]}]
)
def test_it_is_absent_where_it_is_undefined(ratings: dict[str, list[int | None]]) -> None:
    found = agreement(table(ratings))
    assert (found.alpha, found.alpha_low, found.alpha_high) == (None, None, None)


def test_the_interval_holds_the_value_is_the_same_again_and_is_wider_for_fewer_answers() -> None:
    found = agreement(table(KRIPPENDORFF))
    assert found.alpha_low is not None
    assert found.alpha_high is not None
    assert found.alpha_low < found.alpha < found.alpha_high <= 1  # type: ignore[operator]
    assert agreement(table(KRIPPENDORFF)) == found
    assert agreement(table(KRIPPENDORFF), seed=1).alpha_low != found.alpha_low
    many = agreement([
        label(f"{one.trace_id} again {n}", one.step, one.annotator, one.rating)
        for n in range(9) for one in table(KRIPPENDORFF)
    ])  # fmt: skip
    assert many.alpha_high - many.alpha_low < (found.alpha_high - found.alpha_low) / 2  # type: ignore[operator]


def test_one_answer_gives_no_interval() -> None:
    found = agreement(table({"ann": [1, 2], "bo": [1, 3]}))
    assert found.alpha is not None
    assert found.alpha_low is None


def test_each_dimension_has_its_own() -> None:
    labels = table({"ann": [1, 5, 1, 5], "bo": [1, 5, 5, 1]})
    whole, first, second = by_dimension(labels, {"t0": "agreed", "t1": "opposed"})
    assert (whole["dimension"], first["dimension"], second["dimension"]) == (None, "agreed", "opposed")
    assert first["alpha"] == pytest.approx(1)
    assert second["alpha"] < 0 < whole["steps"] == 4


def test_the_composition_of_hard_samples_stands_beside_that_of_all() -> None:
    facts = [
        Facts(
            trace_id=f"t{n}", dimension=dimension, tokens=10 * n, entropy_nats=float(n % 4),
            stop_reason="eos" if n else "length", ends_in_loop=n == 2,
        )
        for n, dimension in zip(range(8), itertools.cycle(["multi_hop", "trivial"]), strict=False)
    ]  # fmt: skip
    labels = [label("t3", 0, "ann", 1), label("t7", 0, "ann", 2), label("t0", 0, "ann", 1), label("t2", 0, "ann", 5)]
    rows = composition(hard_samples(labels, 2), facts)
    shares = {(row["sample_set"], row["property"]): row["share"] for row in rows}
    assert shares["all", "hesitant"] == 0.25  # by its definition: t3 and t7
    assert shares["hard", "hesitant"] == pytest.approx(2 / 3)
    assert shares["labelled", "hesitant"] == 0.5
    assert shares["hard", "dimension trivial"] == pytest.approx(2 / 3)
    assert shares["hard", "cut off"] == pytest.approx(1 / 3)
    assert ("hard", "loops") not in shares
    assert shares["labelled", "loops"] == 0.25
    assert shares["hard", "low_rating"] == 1
    assert shares["labelled", "low_rating"] == 0.75
    assert ("all", "low_rating") not in shares  # nobody has rated them all
    assert {row["of"] for row in rows if row["sample_set"] == "all"} == {8}
