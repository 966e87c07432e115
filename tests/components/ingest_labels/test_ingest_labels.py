"""ingest_labels: what joins, what is quarantined with which reason, and what is made of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from labelled_traces import trace_row, traces_artifact
from stage_writers import writer_for

from reflux.components.artifacts import Artifact
from reflux.components.ingest_labels.agreement import agreement
from reflux.components.ingest_labels.config import IngestLabelsConfig
from reflux.components.ingest_labels.formats import plain_rows
from reflux.components.ingest_labels.known_traces import Traces
from reflux.components.ingest_labels.resolution import join
from reflux.components.ingest_labels.stage import run
from reflux.components.records import read_records
from reflux.components.schemas import HARD_SAMPLES, LABELS
from reflux.components.sources import fetch

STEPS = {"p1": 3, "p2": 1, "p3": 2}
GOOD = {"prompt_id": "p1", "step": 0, "annotator": "ann", "rating": 4}
KNOWN = [trace_row(prompt_id, " ".join(["One step."] * steps)) for prompt_id, steps in STEPS.items()]


@pytest.fixture
def traces(tmp_path: Path) -> Artifact:
    return traces_artifact(tmp_path, KNOWN)


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
        "overload": False, "guardrail": False, "comment": None, "submitted_at": None, "matched_by": "prompt_id",
        "carried_from": None,
    }  # fmt: skip
    assert second == {
        "trace_id": "trace-of-p3", "prompt_id": "p3", "step": 1, "annotator": "bo", "rating": 2,
        "overload": True, "guardrail": False, "comment": "ü", "submitted_at": None, "matched_by": "trace_id",
        "carried_from": None,
    }  # fmt: skip
    assert labels.metrics == {
        "labels": 2, "rejected": 0, "repeated": 0, "replaced": 0, "carried": 0, "matched_by_prompt_alone": 1,
        "marked_tokens": 0, "annotators": 2, "labelled_traces": 2, "steps_rated_twice": 0, "hard_share": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (GOOD | {"prompt_id": "p9"}, "prompt_id 'p9': unknown among the prompts of 3 traces"),
        (GOOD | {"trace_id": "x"}, "trace_id 'x': unknown among 3 traces"),
        (GOOD | {"trace_id": "trace-of-p2"}, "the trace named beside it belongs to 'p2'"),
        (GOOD | {"prompt_id": None}, "one of them must say what was rated"),
        (GOOD | {"prompt_id": ["p1"]}, "prompt_id ['p1']: must be text"),
        (GOOD | {"submitted_at": "2999-01-01T00:00:00Z"}, "submitted_at 2999-01-01T00:00:00Z: lies in the future"),
        (GOOD | {"submitted_at": "yesterday"}, "submitted_at 'yesterday': must be a time as in"),
        (GOOD | {"submitted_at": 1773000000}, "submitted_at 1773000000: must be a time as in"),
        (GOOD | {"submitted_at": "0001-01-01T00:00:00+10:00"}, "lies outside the calendar"),
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
    for name in ("labels", "key_tokens", "hard_samples", "composition", "rejected"):
        assert labels.table(name).num_rows == 0
    assert labels.table("agreement").to_pylist() == [
        {"dimension": None, "steps": 0, "ratings": 0, "annotators": 0, "alpha": None, "alpha_low": None}
        | {"alpha_high": None}
    ]
    assert set(labels.metrics.values()) == {0}


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
    known = Traces(trace_row(prompt_id, "One step. Another.") for prompt_id in asked)
    found = join(plain_rows(fetch("builtin:demo_labels.jsonl")), known)
    assert len(found.labels) == 90
    assert [row["reason"].partition(":")[0] for row in found.rejected] == ["prompt_id 'multi_hop_99'", "rating 6"]
    assert 0.5 < (agreement(found.labels).alpha or 0) < 1
