"""Whose word counts: repeated and replaced rows, and labels of answers that were collected again."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import permutations
from typing import Any

import pytest
from labelled_traces import ANSWERS, trace_row

from reflux.components.ingest_labels.known_traces import Traces, step_texts
from reflux.components.ingest_labels.resolution import Ingested, join
from reflux.components.records import Record

NOW = datetime(2026, 6, 1, tzinfo=UTC)
ROW = trace_row("p1", ANSWERS["p1"])
STEPS = step_texts(ROW)
GOOD = {"trace_id": "trace-of-p1", "step": 1, "annotator": "ann", "rating": 4}
GONE = {"trace_id": "gone", "prompt_id": "p1", "step": 1, "steps": STEPS, "annotator": "ann", "rating": 4}


def joined(rows: list[dict[str, Any]], traces: list[dict[str, Any]] | None = None) -> Ingested:
    records = [Record(source="labels.jsonl", row=n, text="", values=row) for n, row in enumerate(rows, start=1)]
    return join(records, Traces([ROW] if traces is None else traces), NOW)


def test_a_later_rating_replaces_an_earlier_one_in_whatever_order_they_stand() -> None:
    rows = [GOOD | {"rating": rating, "submitted_at": f"2026-03-0{rating}T10:00:00Z"} for rating in (1, 2, 3)]
    for order in permutations([*rows, GOOD | {"rating": 5}]):
        found = joined(list(order))
        assert [label.rating for label in found.labels] == [3]
        assert (found.replaced, found.repeated) == (3, 0)
        place = f"labels.jsonl, row {order.index(rows[2]) + 1}"
        assert {row["reason"] for row in found.rejected} == {
            f"annotator 'ann': rated this step again later, in {place}, which counts"
        }


def test_without_times_the_first_counts() -> None:
    found = joined([GOOD, GOOD | {"rating": 1}])
    assert [label.rating for label in found.labels] == [4]
    (row,) = found.rejected
    assert row["reason"] == (
        "annotator 'ann': rated this step before, in labels.jsonl, row 1; no submitted_at says which is later"
    )


def test_what_is_said_twice_counts_once() -> None:
    found = joined([GOOD, GOOD | {"submitted_at": "2026-03-01T10:00:00"}, GOOD | {"annotator": "bo"}])
    assert (len(found.labels), found.repeated, found.replaced) == (2, 1, 0)


@pytest.mark.parametrize("spelling", ["Ann", " ann ", "\uff41nn"])
def test_a_person_is_one_in_every_spelling(spelling: str) -> None:
    found = joined([GOOD, GOOD | {"annotator": spelling, "step": 2}, GOOD | {"annotator": spelling}])
    assert {label.annotator for label in found.labels} == {"ann"}
    assert found.repeated == 1


def test_times_in_the_future_are_refused_but_not_those_of_another_zone() -> None:
    assert joined([GOOD | {"submitted_at": "2026-06-01T12:00:00"}]).rejected == []
    (row,) = joined([GOOD | {"submitted_at": "2026-06-03T00:00:00+00:00"}]).rejected
    assert row["reason"] == "submitted_at 2026-06-03T00:00:00Z: lies in the future"


def again(response: str, **columns: Any) -> list[dict[str, Any]]:
    return [trace_row("p1", response, trace_id="new", **columns)]


def test_a_label_follows_an_answer_that_reads_the_same_up_to_the_rated_step() -> None:
    for response in (ANSWERS["p1"], f"{STEPS[0]}{STEPS[1]} But it could be more."):
        (label,) = joined([GONE], again(response)).labels
        assert (label.trace_id, label.matched_by, label.carried_from) == ("new", "text", "gone")
    (label,) = joined([GONE | {"steps": [f" {text.strip()}\n" for text in STEPS]}], again(ANSWERS["p1"])).labels
    assert label.trace_id == "new"  # white space is the tool's


@pytest.mark.parametrize(
    "response",
    [
        ANSWERS["p1"].replace("15", "14"),  # the step itself
        ANSWERS["p1"].replace("First 3", "Well, 3"),  # what came before it
        f"{STEPS[0]} Hm.{STEPS[1]}",  # the same step at another place
        STEPS[0],  # an answer that ends before it
        f"{STEPS[0]}{STEPS[1][:-1]} or so.",  # it goes on where it ended
    ],
)
def test_a_label_never_moves_to_an_answer_that_reads_otherwise(response: str) -> None:
    found = joined([GONE], again(response))
    assert found.labels == []
    assert found.rejected[0]["reason"] == "prompt_id 'p1': no answer to it reads, up to what was rated, as it did then"


def test_of_several_answers_to_a_prompt_the_text_finds_the_one_that_was_rated() -> None:
    answers = [*again("Something else. And more."), trace_row("p1", ANSWERS["p1"], trace_id="other teacher")]
    (label,) = joined([GONE], answers).labels
    assert label.trace_id == "other teacher"
    by_prompt = {name: value for name, value in GONE.items() if name not in ("trace_id", "steps")}
    assert "2 answers could be meant; name the trace_id" in joined([by_prompt], answers).rejected[0]["reason"]
    assert "2 answers could be meant" in joined([GONE], [answers[1], *again(ANSWERS["p1"])]).rejected[0]["reason"]


def test_a_step_that_reads_otherwise_is_refused_even_under_its_own_trace_id() -> None:
    (row,) = joined([GOOD | {"step_text": "Then 7 times 2 is 14."}]).rejected
    assert row["reason"].startswith("step 1: reads otherwise now than when it was rated; now it is 'Then 7 times 2")
    assert len(joined([GOOD | {"step_text": "Then 7 times 2 is 15."}]).labels) == 1
    (row,) = joined([GOOD | {"steps": ["First.", *STEPS[1:]]}]).rejected
    assert row["reason"].startswith("step 0: reads otherwise now")


def test_without_the_text_nothing_is_carried() -> None:
    (row,) = joined([{name: value for name, value in GONE.items() if name != "steps"}]).rejected
    assert row["reason"] == "trace_id 'gone': unknown among 1 traces"
    (row,) = joined([GONE | {"steps": STEPS[:1]}]).rejected  # the rated step is not among them
    assert row["reason"] == "trace_id 'gone': unknown among 1 traces"


def test_csv_writes_steps_as_a_list_in_one_field() -> None:
    (label,) = joined(
        [GONE | {"step": "1", "rating": "4", "steps": '["First 3 plus 4 is 7.", "Then 7 times 2 is 15."]'}]
    ).labels
    assert label.carried_from == "gone"
    for steps in ("[1]", "First", {"a": 1}):
        assert "steps" in joined([GONE | {"steps": steps}]).rejected[0]["reason"]


MARK = {"trace_id": "trace-of-p1", "annotator": "ann", "response": ANSWERS["p1"], "start": 0, "end": 5}


def test_a_persons_later_marks_replace_all_earlier_ones() -> None:
    early, late = MARK | {"submitted_at": "2026-03-01T10:00:00Z"}, {"submitted_at": "2026-03-02T10:00:00Z"}
    rows = [early, MARK | late | {"start": 6, "end": 7}, MARK | late | {"start": 8, "end": 12}]
    found = joined([*rows, rows[1], rows[1] | {"mark": "control flow"}])
    assert [(mark.mark, mark.positions) for mark in found.marks] == [("key", [1]), ("key", [2]), ("control flow", [1])]
    assert (found.replaced, found.repeated) == (1, 1)


def test_marks_follow_an_answer_up_to_their_end_and_no_further() -> None:
    gone = MARK | {"trace_id": "gone", "prompt_id": "p1"}
    (mark,) = joined([gone], again(f"{STEPS[0]} Whatever.")).marks
    assert (mark.trace_id, mark.positions) == ("new", [0])
    assert "no answer to it reads" in joined([gone], again("Fifth.")).rejected[0]["reason"]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"start": 5, "end": 5}, "start 5, end 5: must be characters of the response with 0 <= start < end"),
        ({"start": -1}, "start -1, end 5"),
        ({"end": 4000}, "end 4000: the response has 55 characters"),
        ({"end": None}, "end None: must be a whole number"),
        ({"start": 5, "end": 6}, "start 5, end 6: only white space is marked"),
        ({"marked_text": "Fifth"}, "marked_text 'Fifth': the response has 'First' there"),
        ({"response": None}, "marked_text: is missing, and without response nothing shows what"),
        ({"response": "Another answer."}, "response: the answer reads otherwise now, up to the end of what was marked"),
    ],
)
def test_a_mark_that_fits_nothing_is_refused(changed: dict[str, Any], reason: str) -> None:
    found = joined([MARK | changed])
    assert found.marks == []
    assert found.rejected[0]["reason"].startswith(reason)


def test_marks_behind_an_emoji_are_found_whichever_way_the_tool_counts() -> None:
    answer = ANSWERS["p2"]
    at = answer.index("blue")
    row = trace_row("p2", answer)
    for shift in (0, 1):  # code points, UTF-16 units
        mark = {"trace_id": "trace-of-p2", "annotator": "ann", "marked_text": "blue"}
        (found,) = joined([mark | {"start": at + shift, "end": at + 4 + shift}], [row]).marks
        assert found.positions == [4]
