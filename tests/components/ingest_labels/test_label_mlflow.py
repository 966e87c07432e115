"""Feedback that MLflow itself stored and gave back, in the three forms in which people export it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from labelled_traces import ANSWERS, trace_row

from reflux.components.ingest_labels.formats import plain_rows
from reflux.components.ingest_labels.known_traces import Traces
from reflux.components.ingest_labels.resolution import Ingested, join


def ingested(path: Path, records: list[dict[str, Any]]) -> Ingested:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return join(plain_rows(path), Traces(trace_row(*item) for item in ANSWERS.items()))


@pytest.mark.slow
def test_what_mlflow_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow
    from mlflow.entities import AssessmentSource

    monkeypatch.setenv("MLFLOW_ENABLE_ASYNC_TRACE_LOGGING", "false")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    mlflow.set_experiment("labels")
    with mlflow.start_span("answer") as span:
        span.set_inputs("A question called p1")
        mlflow.update_current_trace(tags={"reflux.trace_id": "trace-of-p1"})
    person, model = AssessmentSource("HUMAN", "ann"), AssessmentSource("LLM_JUDGE", "a-model")

    def feedback(name: str, value: Any, source: AssessmentSource = person, **more: Any) -> Any:
        return mlflow.log_feedback(trace_id=span.trace_id, name=name, value=value, source=source, **more)

    first = feedback("rating_0", 5)
    feedback("rating_1", 2, rationale="7 times 2 is 14")
    feedback("overload_1", True)
    feedback("rating_0", 1, model)
    mlflow.override_feedback(trace_id=span.trace_id, assessment_id=first.assessment_id, value=4, source=person)
    trace = mlflow.get_trace(span.trace_id)

    expected = {("rating", 0, 4, False, None), ("rating", 1, 2, True, "7 times 2 is 14")}
    frame = mlflow.search_traces(locations=[mlflow.get_experiment_by_name("labels").experiment_id])
    (row,) = json.loads(frame.to_json(orient="records"))
    mlflow.set_tracking_uri(None)
    for form, records in {
        "trace": [trace.to_dict()],
        "row": [row],
        "assessments": [
            one.to_dictionary() | {"metadata": {"reflux.trace_id": "trace-of-p1"}} for one in trace.info.assessments
        ],
    }.items():
        found = ingested(tmp_path / f"{form}.jsonl", records)
        said = {("rating", one.step, one.rating, one.overload, one.comment) for one in found.labels}
        if form == "assessments":  # each stands alone, so what was said beside a rating is not joined to it
            assert {one[:3] for one in said} == {one[:3] for one in expected}
        else:
            assert said == expected, form
            assert {one.trace_id for one in found.labels} == {"trace-of-p1"}
        reasons = " ".join(row["reason"] for row in found.rejected)
        assert "source_type 'LLM_JUDGE'" in reasons
        assert all(one.submitted_at for one in found.labels)
