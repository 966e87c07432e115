"""Human feedback on MLflow traces: `Trace.to_dict()`, rows of `mlflow.search_traces()`, or assessments by themselves.

MLflow gives its traces ids of its own. Ours is read from the tag or metadata `reflux.trace_id` (or `reflux.prompt_id`),
else from the trace's `client_request_id`. Each assessment carries its time, so a person's later one replaces it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from reflux.components.ingest_labels.questions import Submission, mapping, mappings, refused, rows
from reflux.components.records import Record

_HUMAN = "HUMAN"


def recognises(values: Mapping[str, Any]) -> bool:
    return "assessments" in values or "assessment_name" in values or "assessments" in mapping(values.get("info"))


def unfold(record: Record) -> Iterator[Record]:
    """The plain rows of one trace or assessment; what is not a person's valid feedback is refused with its reason."""
    values = record.values
    trace = mapping(values.get("info")) or values
    found = [values] if "assessment_name" in values else trace.get("assessments")
    replaced = {str(assessment["overrides"]) for assessment in mappings(found) if assessment.get("overrides")}
    by_step: dict[str, list[Submission]] = defaultdict(list)
    for assessment in mappings(found):
        source, value = mapping(assessment.get("source")), mapping(assessment.get("feedback"))
        name, kind = str(assessment.get("assessment_name")), source.get("source_type")
        shown = {"assessment_name": name, "source": source, "feedback": value}
        if assessment.get("valid") is False or str(assessment.get("assessment_id")) in replaced:
            yield refused(record, f"assessment {name}: a later one overrides it", shown)
        elif kind != _HUMAN:
            yield refused(record, f"assessment {name}: source_type {kind!r}; only {_HUMAN} is an expert", shown)
        elif "value" not in value:
            yield refused(record, f"assessment {name}: holds no feedback value", shown)
        else:
            number = name.rpartition("_")[2]
            about_one_step = repr((source.get("source_id"), number if number.isdigit() else ""))
            by_step[about_one_step].append(_submission(trace, assessment, name, value["value"]))
    for given in by_step.values():
        yield from _merged(record, given)


def _submission(trace: Mapping[str, Any], assessment: dict[str, Any], name: str, value: Any) -> Submission:
    notes = {
        **mapping(trace.get("tags")),
        **mapping(trace.get("trace_metadata")),
        **mapping(assessment.get("metadata")),
    }
    about = {
        "trace_id": notes.get("reflux.trace_id"),
        "prompt_id": notes.get("reflux.prompt_id"),
        "step": notes.get("step"),
    }
    if not about["trace_id"] and not about["prompt_id"]:
        about["trace_id"] = trace.get("client_request_id") or trace.get("trace_id")
    submission = Submission(
        annotator=mapping(assessment.get("source")).get("source_id"),
        submitted_at=assessment.get("last_update_time") or assessment.get("create_time"),
        about=about,
        answers=[(name, value)],
    )
    if assessment.get("rationale") and name.startswith("rating"):
        submission.answers.append((name.replace("rating", "comment", 1), assessment["rationale"]))
    return submission


def _merged(record: Record, given: list[Submission]) -> Iterator[Record]:
    """One row per rating, with the person's other answers about the step: MLflow stores each answer by itself."""
    ratings = [one for one in given if one.answers[0][0].startswith("rating")]
    others = [answer for one in given if one not in ratings for answer in one.answers]
    for one in ratings or given[:1]:
        answers = [*one.answers, *others] if ratings else others
        yield from rows(
            record,
            Submission(annotator=one.annotator, submitted_at=one.submitted_at, about=one.about, answers=answers),
        )
