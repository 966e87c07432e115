"""Label Studio's JSON export: tasks with their data and everybody's annotations.

Written by its Export page (JSON, not JSON-MIN: that one has no results of repeated questions in older versions) or by
its SDK. https://labelstud.io/guide/task_format
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from reflux.components.ingest_labels.questions import KEY_TOKENS, Submission, mapping, mappings, refused, rows
from reflux.components.records import Record

_ABOUT = ("trace_id", "prompt_id", "step", "response")


def recognises(values: Mapping[str, Any]) -> bool:
    return "annotations" in values and "data" in values


def unfold(record: Record) -> Iterator[Record]:
    """The plain rows of one task. Predictions and drafts are nobody's submission and left out."""
    annotations, data = record.values["annotations"], record.values["data"]
    if not isinstance(annotations, list) or not isinstance(data, dict):
        yield refused(record, "annotations, data: must be a list and an object, as in Label Studio's JSON export")
        return
    steps = data.get("steps")
    if isinstance(steps, list):
        steps = [step.get("text") if isinstance(step, dict) else step for step in steps]
    about = {name: data.get(name) for name in _ABOUT} | {"steps": steps}
    for annotation in annotations:
        if not isinstance(annotation, dict):
            yield refused(record, f"annotation {annotation!r:.60}: must be an object")
        elif annotation.get("was_cancelled"):
            yield refused(record, "annotation: the annotator skipped the task", {"annotator": _annotator(annotation)})
        else:
            yield from rows(record, _submission(annotation, about))


def _submission(annotation: dict[str, Any], about: dict[str, Any]) -> Submission:
    submission = Submission(
        annotator=_annotator(annotation),
        submitted_at=annotation.get("updated_at") or annotation.get("created_at"),
        about=about,
    )
    for result in mappings(annotation.get("result")):
        name, kind, value = str(result.get("from_name")), str(result.get("type")), mapping(result.get("value"))
        if kind == "labels" and name == KEY_TOKENS and result.get("to_name") == "response":
            labels = value.get("labels")
            submission.marks.extend(
                {"start": value.get("start"), "end": value.get("end"), "marked_text": value.get("text"), "mark": label}
                for label in (labels if isinstance(labels, list) else [None])
            )
        else:
            question = f"{name} on {result.get('to_name')}" if kind == "labels" else name
            submission.answers.append((question, value.get("text" if kind == "textarea" else kind)))
    return submission


def _annotator(annotation: dict[str, Any]) -> Any:
    """An id, or in some exports the person with an e-mail address."""
    by = annotation.get("completed_by")
    return (by.get("email") or by.get("id")) if isinstance(by, dict) else by
