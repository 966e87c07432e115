"""The exports that people have: whichever tool wrote them, the same judgements give the same rows."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from labelled_traces import ANSWERS, EXPORTS, trace_row

from reflux.components.ingest_labels.formats import plain_rows
from reflux.components.ingest_labels.known_traces import Traces
from reflux.components.ingest_labels.resolution import Ingested, join
from reflux.components.ingest_labels.stage import load

FILES = sorted(path.name for path in EXPORTS.glob("*.*") if path.suffix != ".md")


def ingested(path: Path) -> Ingested:
    return join(plain_rows(path), Traces(trace_row(*item) for item in ANSWERS.items()))


def judgements(found: Ingested) -> set[tuple[Any, ...]]:
    return {(one.trace_id, one.annotator, one.step, one.rating, one.overload, one.comment) for one in found.labels}


EXPECTED = {
    ("trace-of-p1", "ann", 0, 5, False, None),
    ("trace-of-p1", "ann", 1, 2, True, "7 times 2 is 14"),
    ("trace-of-p1", "bo", 0, 4, False, None),
}


@pytest.mark.parametrize("name", FILES)
def test_every_tool_gives_the_same_labels(name: str) -> None:
    found = ingested(EXPORTS / name)
    assert found.rejected == []
    assert judgements(found) == EXPECTED
    marks = [(mark.annotator, mark.mark, mark.positions) for mark in found.marks]
    assert marks == ([] if name in ("mlflow_traces.jsonl", "plain.csv") else [("ann", "key", [11])])  # "15."


@pytest.mark.parametrize("name", ["label_studio.json", "argilla_server.json", "mlflow_traces.jsonl"])
def test_the_time_of_an_answer_is_kept_where_the_tool_tells_it(name: str) -> None:
    times = {(one.annotator, one.step): one.submitted_at for one in ingested(EXPORTS / name).labels}
    assert {f"{time:%d %H:%M}" for time in times.values() if time} == {"09 10:05", "09 11:00"}


def test_a_zipped_export_a_folder_and_json_lines_called_json(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "export.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(EXPORTS / "label_studio.json", "project-3/export.json")
    assert judgements(ingested(tmp_path / "export.zip")) == EXPECTED
    (tmp_path / "lines").mkdir()
    tasks = json.loads((EXPORTS / "label_studio.json").read_text())
    (tmp_path / "lines" / "export.json").write_text("\n".join(json.dumps(task) for task in tasks))
    assert judgements(ingested(tmp_path / "lines")) == EXPECTED


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[{", r"export\.json, line 1: not JSON"),
        ("[]".encode("utf-16"), r"export\.json: not UTF-8"),
        (b"[" * 100_000, r"export\.json: not usable JSON"),
    ],
)
def test_a_document_that_cannot_be_read_is_named(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "export.json").write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        ingested(tmp_path / "export.json")


@pytest.mark.parametrize("content", ["", "[]", "[{}]"])
def test_an_empty_export_holds_no_label(content: str, tmp_path: Path) -> None:
    (tmp_path / "export.json").write_text(content)
    assert ingested(tmp_path / "export.json").labels == []


def rejected(tmp_path: Path, records: Any) -> list[str]:
    (tmp_path / "export.json").write_text(json.dumps(records))
    return [row["reason"] for row in ingested(tmp_path / "export.json").rejected]


def test_what_label_studio_exports_beside_ratings(tmp_path: Path) -> None:
    task = json.loads((EXPORTS / "label_studio.json").read_text())[0]
    person = {"completed_by": 7, "was_cancelled": False, "created_at": "2026-03-09T10:00:00Z"}
    other = {"from_name": "sentiment", "to_name": "response", "type": "choices", "value": {"choices": ["good"]}}
    relation = {"type": "relation", "from_id": "a", "to_id": "b", "direction": "right"}
    choice = {"from_name": "flags_0", "to_name": "step_0", "type": "choices", "value": {"choices": ["rude"]}}
    prompt = {"from_name": "key_tokens", "to_name": "prompt", "type": "labels", "value": {"start": 0, "end": 1}}
    task["annotations"] = [
        person | {"result": [], "was_cancelled": True},
        person | {"result": []},
        person | {"result": [other, relation, prompt]},
        person | {"result": [choice]},
        "broken",
    ]
    assert rejected(tmp_path, [task, task | {"annotations": {}}]) == [
        "annotation: the annotator skipped the task",
        "submission: holds no answer",
        "questions sentiment, None, key_tokens on prompt: allowed are rating_STEP, overload_STEP, guardrail_STEP, "
        "flags_STEP, comment_STEP and key_tokens",
        "rating None: must be a whole number",
        "questions flags_0: rude: allowed are rating_STEP, overload_STEP, guardrail_STEP, flags_STEP, comment_STEP and "
        "key_tokens",
        "annotation 'broken': must be an object",
        "annotations, data: must be a list and an object, as in Label Studio's JSON export",
    ]


def test_a_project_with_one_step_per_task_names_the_step_in_its_data(tmp_path: Path) -> None:
    result = {"from_name": "rating", "to_name": "text", "type": "choices", "value": {"choices": ["4"]}}
    task = {
        "data": {"prompt_id": "p1", "step": 2},
        "annotations": [{"completed_by": 7, "result": [result], "created_at": "2026-03-09T10:00:00Z"}],
    }
    (tmp_path / "export.json").write_text(json.dumps(task))
    (label,) = ingested(tmp_path / "export.json").labels
    assert (label.step, label.rating, label.annotator) == (2, 4, "7")


def test_drafts_in_argilla_do_not_count(tmp_path: Path) -> None:
    (record,) = json.loads((EXPORTS / "argilla_server.json").read_text())
    record["responses"][0]["status"] = "draft"
    assert rejected(tmp_path, [record]) == ["response: its status is 'draft'; only submitted ones count"]


def test_in_argilla_the_records_own_id_may_be_the_trace(tmp_path: Path) -> None:
    (record,) = json.loads((EXPORTS / "argilla_nested.json").read_text())
    (tmp_path / "export.json").write_text(json.dumps(record | {"metadata": {}, "id": "trace-of-p1"}))
    assert judgements(ingested(tmp_path / "export.json")) == EXPECTED


def test_machines_and_overridden_feedback_in_mlflow_do_not_count(tmp_path: Path) -> None:
    trace = json.loads((EXPORTS / "mlflow_traces.jsonl").read_text())
    by_ann, second, overload, by_bo = trace["info"]["assessments"]
    trace["info"]["assessments"] = [
        by_ann | {"source": {"source_type": "LLM_JUDGE", "source_id": "a-model"}},
        second | {"valid": False},
        overload | {"assessment_name": "rating_1", "feedback": {"error": {"error_code": "X"}}},
        by_bo,
        by_bo | {"assessment_id": "newer", "overrides": by_bo["assessment_id"], "feedback": {"value": 1.0}},
    ]
    assert rejected(tmp_path, trace) == [
        "assessment rating_0: source_type 'LLM_JUDGE'; only HUMAN is an expert",
        "assessment rating_1: a later one overrides it",
        "assessment rating_1: holds no feedback value",
        "assessment rating_0: a later one overrides it",
    ]
    assert {one.rating for one in ingested(tmp_path / "export.json").labels} == {1}


def test_a_row_of_search_traces_and_a_single_assessment(tmp_path: Path) -> None:
    info = json.loads((EXPORTS / "mlflow_traces.jsonl").read_text())["info"]
    row = {"trace_id": "tr-7c1d", "state": "OK", "spans": [], **{name: info[name] for name in ("tags", "assessments")}}
    alone = info["assessments"][3] | {"metadata": {"reflux.trace_id": "trace-of-p2"}}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(alone)}\n")
    expected = EXPECTED | {("trace-of-p2", "bo", 0, 4, False, None)}
    assert judgements(ingested(tmp_path / "rows.jsonl")) == expected


def test_an_export_without_the_results_is_refused_with_what_would_help(tmp_path: Path) -> None:
    row = {"id": 1, "annotation_id": 7, "annotator": 1, "lead_time": 3.2, "trace_id": "trace-of-p1", "rating_0": 4}
    (tmp_path / "export.json").write_text(json.dumps([row]))
    with pytest.raises(ValueError, match=r"no column step, rating; .*export JSON instead of JSON-MIN or CSV"):
        load(tmp_path / "export.json")
