"""Argilla's records, as `dataset.records` exports them: nested (`to_json`), flat (`to_datasets`) or from its server.

A record's `metadata` names trace_id or prompt_id; without them its `id` is taken for the trace_id. The nested form
does not say when somebody answered, nor whether the answer was a draft: export submitted responses only.
https://docs.argilla.io
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from reflux.components.ingest_labels.questions import KEY_TOKENS, Submission, mapping, mappings, refused, rows
from reflux.components.records import Record

_FLAT = ".responses"


def recognises(values: Mapping[str, Any]) -> bool:
    return ("responses" in values and "fields" in values) or any(name.endswith(f"{_FLAT}.users") for name in values)


def unfold(record: Record) -> Iterator[Record]:
    """The plain rows of one record. Suggestions come from machines and are left out."""
    values = record.values
    if "fields" not in values:
        yield from _responses(record, values, _flat(values))
    elif isinstance(values["responses"], list):
        about = {**mapping(values["fields"]), **mapping(values.get("metadata"))}
        yield from _responses(record, about, _from_server(values["responses"]))
    elif isinstance(values["responses"], dict | None):
        about = {**mapping(values["fields"]), **mapping(values.get("metadata"))}
        yield from _responses(record, about, _nested(values["responses"] or {}))
    else:
        yield refused(record, "responses: must be an object or a list, as Argilla exports them")


_Answer = tuple[Any, Any, Any, str, Any]
"""user, status, time, question, value"""


def _responses(record: Record, about: Mapping[str, Any], answers: Iterator[_Answer]) -> Iterator[Record]:
    known = {name: about.get(name) for name in ("trace_id", "prompt_id", "step", "response", "steps")}
    if not known["trace_id"] and not known["prompt_id"]:
        known["trace_id"] = record.values.get("external_id") or record.values.get("id")
    by_person: dict[str, list[_Answer]] = defaultdict(list)
    for answer in answers:
        by_person[repr(answer[:3])].append(answer)
    for given in by_person.values():
        user, status, time = given[0][:3]
        if status not in (None, "submitted"):
            yield refused(record, f"response: its status is {status!r}; only submitted ones count", {"annotator": user})
            continue
        submission = Submission(annotator=user, submitted_at=time, about=known)
        for *_, question, value in given:
            if question == KEY_TOKENS:
                submission.marks.extend(
                    {"start": span.get("start"), "end": span.get("end"), "mark": span.get("label")}
                    for span in mappings(value)
                )
            else:
                submission.answers.append((question, value))
        yield from rows(record, submission)


def _nested(responses: Mapping[str, Any]) -> Iterator[_Answer]:
    for question, given in responses.items():
        for response in mappings(given):
            yield response.get("user_id"), response.get("status"), None, question, response.get("value")


def _from_server(responses: list[Any]) -> Iterator[_Answer]:
    for response in mappings(responses):
        time = response.get("updated_at") or response.get("inserted_at")
        for question, answer in mapping(response.get("values")).items():
            value = answer.get("value") if isinstance(answer, dict) else answer
            yield response.get("user_id"), response.get("status"), time, question, value


def _flat(values: Mapping[str, Any]) -> Iterator[_Answer]:
    for name, given in values.items():
        users, statuses = values.get(f"{name}.users"), values.get(f"{name}.status")
        if not name.endswith(_FLAT) or not isinstance(given, list) or not isinstance(users, list):
            continue
        states = statuses if isinstance(statuses, list) else [None] * len(given)
        for value, user, status in zip(given, users, states, strict=False):
            yield user, status, None, name.removesuffix(_FLAT), value
