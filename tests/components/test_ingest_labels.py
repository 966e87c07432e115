"""ingest_labels: what joins, what is quarantined with which reason, and that no input at all breaks the reader."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_writers import writer_for

from reflux.components.artifacts import Artifact
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.ingest_labels.agreement import krippendorff_alpha
from reflux.components.ingest_labels.config import IngestLabelsConfig
from reflux.components.ingest_labels.stage import hard_samples, join, run
from reflux.components.ingest_labels.validation import Label, Traces
from reflux.components.records import read_records
from reflux.components.schemas import HARD_SAMPLES, LABELS, traces_topk
from reflux.components.sources import fetch

STEPS = {"p1": 3, "p2": 1, "p3": 2}
GOOD = {"prompt_id": "p1", "step": 0, "annotator": "ann", "rating": 4}


def trace_row(prompt_id: str, steps: int) -> dict[str, Any]:
    empty: dict[str, Any] = {field.name: "" if field.type == pa.string() else [] for field in traces_topk(1)}
    return empty | {"trace_id": f"trace-of-{prompt_id}", "prompt_id": prompt_id, "step_starts": list(range(steps))}


KNOWN = [trace_row(prompt_id, steps) for prompt_id, steps in STEPS.items()]


@pytest.fixture
def traces(tmp_path: Path) -> Artifact:
    (tmp_path / "asked.jsonl").write_text("{}\n")
    config = CollectTracesConfig(teacher=str(tmp_path / "asked.jsonl"), prompts_uri=str(tmp_path / "asked.jsonl"))
    writer = writer_for(tmp_path / "store", "collect_traces", config)
    writer.write_table("traces/00000", pa.Table.from_pylist(KNOWN, schema=traces_topk(1)), traces_topk(1))
    return writer.commit({})


@pytest.fixture
def ingest(traces: Artifact, tmp_path: Path) -> Callable[..., Artifact]:
    def ingest(rows: list[Any] | Path, **options: Any) -> Artifact:
        file = rows if isinstance(rows, Path) else tmp_path / "labels.jsonl"
        if not isinstance(rows, Path):
            file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        config = IngestLabelsConfig(labels_uri=str(file), **options)
        writer = writer_for(tmp_path / "store", "ingest_labels", config, traces=traces)
        return writer.commit(run(config, traces=traces, labels=writer))

    return ingest


def test_labels_join_by_prompt_or_trace(ingest: Callable[..., Artifact]) -> None:
    by_trace = {
        "trace_id": "trace-of-p3",
        "step": 1,
        "annotator": "bo",
        "rating": 2.0,
        "overload": True,
        "comment": "ü",
    }
    labels = ingest([GOOD, by_trace])
    assert labels.table("labels").schema.equals(LABELS)
    first, second = labels.table("labels").to_pylist()
    assert first == {
        "trace_id": "trace-of-p1", "prompt_id": "p1", "step": 0, "annotator": "ann", "rating": 4,
        "overload": False, "guardrail": False, "comment": None,
    }  # fmt: skip
    assert second == {
        "trace_id": "trace-of-p3", "prompt_id": "p3", "step": 1, "annotator": "bo", "rating": 2,
        "overload": True, "guardrail": False, "comment": "ü",
    }  # fmt: skip
    assert labels.metrics == {
        "labels": 2, "rejected": 0, "annotators": 2, "labelled_traces": 2, "hard_share": 0.5
    }  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (GOOD | {"prompt_id": "p9"}, "prompt_id 'p9': unknown among the prompts of 3 traces"),
        (GOOD | {"trace_id": "x"}, "trace_id 'x': unknown among 3 traces"),
        (GOOD | {"trace_id": "trace-of-p2"}, "the trace named beside it belongs to 'p2'"),
        (GOOD | {"prompt_id": None}, "one of them must say what was rated"),
        (GOOD | {"prompt_id": ["p1"]}, "prompt_id ['p1']: must be text"),
        (GOOD | {"step": 3}, "step 3: the trace has 3 steps, counted from 0"),
        (GOOD | {"step": -1}, "step -1: the trace has 3 steps"),
        (GOOD | {"step": None}, "step None: must be a whole number"),
        (GOOD | {"rating": 6}, "rating 6: must be a whole number from 1 to 5"),
        (GOOD | {"rating": 0}, "rating 0"),
        (GOOD | {"rating": math.nan}, "rating nan: must be a whole number"),
        (GOOD | {"rating": math.inf}, "rating inf"),
        (GOOD | {"rating": 3.5}, "rating 3.5"),
        (GOOD | {"rating": "good"}, "rating 'good'"),
        (GOOD | {"rating": "9" * 5000}, "rating '999"),
        (GOOD | {"rating": True}, "rating True"),
        (GOOD | {"annotator": " "}, "annotator: is missing"),
        (GOOD | {"overload": "maybe"}, "overload 'maybe': must be true or false"),
        (GOOD | {"guardrail": 2}, "guardrail 2: must be true or false"),
        (GOOD, "annotator 'ann': rated this step before, in labels.jsonl, row 1"),
        ('{"prompt_id": "p1", ', "not a JSON object"),
        ("17", "not a JSON object but a int"),
    ],
)
def test_a_bad_row_is_kept_aside_with_its_reason(bad: Any, reason: str, ingest: Callable[..., Artifact]) -> None:
    after = GOOD | {"step": 1}
    labels = ingest([GOOD, bad, after])
    assert labels.table("labels")["step"].to_pylist() == [0, 1]
    (row,) = labels.table("rejected").to_pylist()
    assert reason in row["reason"]
    assert (row["source"], row["row"]) == ("labels.jsonl", 2)
    assert row["record"] == (bad if isinstance(bad, str) else json.dumps(bad))[:2000]
    assert labels.metrics["rejected"] == 1


def test_csv_and_parquet_give_the_same_labels(ingest: Callable[..., Artifact], tmp_path: Path) -> None:
    rows = [
        GOOD | {"overload": True, "comment": 'a "quote"\nand a line'},
        GOOD | {"step": 1, "overload": False, "comment": None},
    ]
    from_jsonl = ingest(rows).table("labels")
    csv_file, parquet_file = tmp_path / "labels.csv", tmp_path / "labels.parquet"
    csv_file.write_text(
        "prompt_id,step,annotator,rating,overload,comment\n"
        'p1,0,ann,4.0,TRUE,"a ""quote""\nand a line"\n'
        "p1,1, ann ,4,no,\n"
    )
    pq.write_table(pa.Table.from_pylist([row | {"rating": 4.0} for row in rows]), parquet_file)
    assert ingest(csv_file).table("labels") == from_jsonl
    assert ingest(parquet_file).table("labels") == from_jsonl


def test_no_labels_is_a_valid_answer(traces: Artifact, tmp_path: Path) -> None:
    config = IngestLabelsConfig()
    writer = writer_for(tmp_path / "store", "ingest_labels", config, traces=traces)
    labels = writer.commit(run(config, traces=traces, labels=writer))
    assert [labels.table(name).num_rows for name in ("labels", "hard_samples", "rejected")] == [0, 0, 0]
    assert labels.metrics == {"labels": 0, "rejected": 0, "annotators": 0, "labelled_traces": 0}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "labels.jsonl: no usable row; it is empty"),
        (json.dumps(GOOD | {"rating": 9}).encode(), "all 1 were rejected, the first for rating 9"),
        (json.dumps(GOOD).encode("utf-16"), "labels.jsonl, line 1: not UTF-8"),
    ],
)
def test_files_without_a_usable_row_are_refused(
    content: bytes, message: str, ingest: Callable[..., Artifact], tmp_path: Path
) -> None:
    (tmp_path / "labels.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        ingest(tmp_path / "labels.jsonl")


def test_hard_samples_say_why(ingest: Callable[..., Artifact]) -> None:
    rows = [
        GOOD | {"rating": 5},
        GOOD | {"rating": 3, "annotator": "bo"},
        GOOD | {"prompt_id": "p2", "rating": 2},
        GOOD | {"prompt_id": "p3", "rating": 4, "overload": True, "guardrail": True},
    ]
    samples = ingest(rows).table("hard_samples")
    assert samples.schema.equals(HARD_SAMPLES)
    found = {row["prompt_id"]: row for row in samples.to_pylist()}
    assert found["p1"] == {
        "trace_id": "trace-of-p1", "prompt_id": "p1", "ratings": 2, "rating_mean": 4.0, "rating_min": 3,
        "hard": False, "reasons": [],
    }  # fmt: skip
    assert (found["p2"]["hard"], found["p2"]["reasons"]) == (True, ["low_rating"])
    assert found["p3"]["reasons"] == ["overload", "guardrail"]
    assert ingest(rows, hard_rating=3).metrics["hard_share"] == 1
    with pytest.raises(ValueError, match="hard_rating 6"):
        IngestLabelsConfig(hard_rating=6)


def test_the_demo_labels_show_two_rows_in_quarantine() -> None:
    asked = {record.values["prompt_id"] for record in read_records(fetch("builtin:demo_prompts.jsonl"))}
    known = Traces(trace_row(prompt_id, 2) for prompt_id in asked)
    labels, rejected = join(list(read_records(fetch("builtin:demo_labels.jsonl"))), known)
    assert len(labels) == 90
    assert [row["reason"].partition(":")[0] for row in rejected] == ["prompt_id 'multi_hop_99'", "rating 6"]
    assert 0.5 < (krippendorff_alpha(labels) or 0) < 1


def label(step: int, annotator: str, rating: int) -> Label:
    return Label(
        trace_id="t", prompt_id="p", step=step, annotator=annotator, rating=rating,
        overload=False, guardrail=False, comment=None,
    )  # fmt: skip


def test_agreement_is_1_when_experts_agree_and_absent_when_it_is_undefined() -> None:
    agreeing = [label(step, annotator, 1 + step) for step in range(4) for annotator in ("ann", "bo")]
    assert krippendorff_alpha(agreeing) == pytest.approx(1)
    opposed = [
        label(step, annotator, 1 + 4 * ((step + i) % 2)) for step in range(4) for i, annotator in enumerate("ab")
    ]
    assert krippendorff_alpha(opposed) == pytest.approx(-0.75)  # 1 - (n - 1) / (n / 2) for n = 8 ratings
    assert krippendorff_alpha([]) is None
    assert krippendorff_alpha([label(step, "ann", 1 + step) for step in range(4)]) is None
    assert krippendorff_alpha([label(0, "ann", 3), label(0, "bo", 3)]) is None


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
nearly_a_label = st.fixed_dictionaries(
    {},
    optional={
        "prompt_id": st.sampled_from([*STEPS, "p9"]) | anything,
        "trace_id": st.sampled_from(["trace-of-p1", ""]) | anything,
        "step": st.integers(-1, 3) | anything,
        "annotator": st.text(max_size=3) | anything,
        "rating": st.integers(0, 6) | anything,
        "overload": anything,
        "comment": anything,
    },
)
lines = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\n\ufeff")) | (
    anything | nearly_a_label
).map(json.dumps)


def ingested(name: str, content: bytes) -> tuple[list[Label], list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, name)
        file.write_bytes(content)
        labels, rejected = join(list(read_records(file)), Traces(iter(KNOWN)))
    pa.Table.from_pylist([asdict(one) for one in labels], schema=LABELS)
    pa.Table.from_pylist(hard_samples(labels, 2), schema=HARD_SAMPLES)
    alpha = krippendorff_alpha(labels)
    assert alpha is None or math.isfinite(alpha)
    return labels, rejected


@settings(max_examples=150, deadline=None)
@given(noise=st.lists(lines, max_size=6), steps=st.permutations(range(3)), data=st.data())
def test_no_valid_row_is_lost_among_noise_and_no_row_vanishes(
    noise: list[str], steps: list[int], data: st.DataObject
) -> None:
    valid = [json.dumps(GOOD | {"step": step, "annotator": "valid \U0001f600", "rating": step + 1}) for step in steps]
    rows = data.draw(st.permutations(noise + valid))
    labels, rejected = ingested("labels.jsonl", "\n".join(rows).encode())
    own = sorted(one.step for one in labels if one.annotator == "valid \U0001f600")
    assert own == [0, 1, 2]
    assert len(labels) + len(rejected) == sum(1 for row in rows if row.strip())


def ingested_or_refused(name: str, content: bytes) -> list[Label] | str:
    """Labels, or the message of the only kind of error that a file may lead to."""
    try:
        return ingested(name, content)[0]
    except ValueError as error:
        return str(error)


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(["labels.jsonl", "labels.csv", "labels.parquet"]), content=st.binary(max_size=200))
def test_arbitrary_bytes_give_no_label_or_a_clear_error(name: str, content: bytes) -> None:
    outcome = ingested_or_refused(name, content)
    assert outcome == [] or name in outcome


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(blacklist_categories=["Cs"])))
def test_arbitrary_text_after_a_csv_row_leaves_it_or_is_a_clear_error(text: str) -> None:
    outcome = ingested_or_refused("labels.csv", f"prompt_id,step,annotator,rating\np1,0,ann,4\n{text}".encode())
    assert "labels.csv" in outcome if isinstance(outcome, str) else outcome[0].rating == 4
