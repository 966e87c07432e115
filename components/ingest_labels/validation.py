"""One plain row becomes a label or a mark, or a reason why it cannot be one.

Exports differ in how they spell numbers and truth values (CSV has only text, spreadsheets write 4.0), so spelling is
read generously and meaning strictly: nothing is rounded, guessed or filled in.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from reflux.components.ingest_labels.known_traces import Rated, Traces
from reflux.components.ingest_labels.marks import token_positions
from reflux.components.records import Record, read_text_field, shown

RATINGS = range(1, 6)
NEEDED = {
    "prompt_id or trace_id": {"prompt_id", "trace_id"},
    "step": {"step", "start"},
    "annotator": {"annotator"},
    "rating": {"rating", "end"},
}
"""What is missing -> the columns of which one is needed; start and end belong to marks."""
TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False, "": False}
_WHOLE = re.compile(r"[+-]?[0-9]{1,9}(\.0*)?")


@dataclass(frozen=True, kw_only=True)
class Label:
    trace_id: str
    prompt_id: str
    step: int
    annotator: str
    rating: int
    overload: bool
    guardrail: bool
    comment: str | None
    submitted_at: datetime | None = None
    matched_by: str = "trace_id"
    carried_from: str | None = None


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A span of an answer that somebody marked, as the tokens that it covers."""

    trace_id: str
    prompt_id: str
    annotator: str
    mark: str
    span: tuple[int, int]
    """As given: characters of the response."""
    positions: list[int]
    """Of the tokens in the response, from 0; none while the answer is still to be given."""
    submitted_at: datetime | None = None


def require_columns(records: Iterable[Record]) -> None:
    """ValueError if no row at all has a column that every label needs; rows that only lack a value are not meant."""
    present = {name for record in records for name in record.values}
    if not present:  # an empty file, or one whose rows could not be parsed
        return
    missing = [meaning for meaning, names in NEEDED.items() if not present & names]
    if missing:
        shortened = {"annotation_id", "lead_time"} <= present
        hint = "; from Label Studio, export JSON instead of JSON-MIN or CSV" if shortened else ""
        raise ValueError(f"no column {', '.join(missing)}; it has {', '.join(sorted(present))}{hint}")


def read_row(record: Record, traces: Traces, latest: datetime) -> Label | Mark:
    """ValueError with field, value and what is allowed. Times after `latest` are refused."""
    if record.problem:
        raise ValueError(record.problem)
    marks = any(record.values.get(name) not in (None, "") for name in ("start", "end"))
    return read_mark(record, traces, latest) if marks else read_label(record, traces, latest)


def read_label(record: Record, traces: Traces, latest: datetime) -> Label:
    values = record.values
    step = whole_number(values, "step")
    rated = Rated(step=step, step_text=read_text_field(values, "step_text"), steps=_texts(values, "steps"))
    match = traces.find(read_text_field(values, "trace_id"), read_text_field(values, "prompt_id"), rated=rated)
    if not 0 <= step < match.trace.steps:
        has = "can have" if traces.foreseen else "has"
        raise ValueError(f"step {step}: the trace {has} {match.trace.steps} steps, counted from 0")
    rating = whole_number(values, "rating")
    if rating not in RATINGS:
        raise ValueError(f"rating {rating}: must be a whole number from 1 to 5")
    return Label(
        trace_id=match.trace.trace_id,
        prompt_id=match.trace.prompt_id,
        step=step,
        annotator=_annotator(values),
        rating=rating,
        overload=_truth(values, "overload"),
        guardrail=_truth(values, "guardrail"),
        comment=read_text_field(values, "comment") or None,
        submitted_at=_time(values, "submitted_at", latest),
        matched_by=match.matched_by,
        carried_from=match.carried_from,
    )


def read_mark(record: Record, traces: Traces, latest: datetime) -> Mark:
    values = record.values
    start, end = whole_number(values, "start"), whole_number(values, "end")
    response = values.get("response")
    if response is not None and not isinstance(response, str):
        raise ValueError(f"response {shown(response)}: must be text")
    rated = Rated(response=response or None, end=max(end, 0))
    match = traces.find(read_text_field(values, "trace_id"), read_text_field(values, "prompt_id"), rated=rated)
    marked_text = values.get("marked_text")
    if not response and not isinstance(marked_text, str):
        raise ValueError("marked_text: is missing, and without response nothing shows what the characters were")
    return Mark(
        trace_id=match.trace.trace_id,
        prompt_id=match.trace.prompt_id,
        annotator=_annotator(values),
        mark=read_text_field(values, "mark") or "key",
        span=(start, end),
        positions=token_positions(match.trace, start, end, marked_text if isinstance(marked_text, str) else None),
        submitted_at=_time(values, "submitted_at", latest),
    )


def whole_number(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        value = int(value.strip().partition(".")[0])
    elif isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} {shown(value)}: must be a whole number")
    return value


def _annotator(values: dict[str, Any]) -> str:
    if annotator := read_text_field(values, "annotator"):
        return annotator
    raise ValueError("annotator: is missing")


def _truth(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name)
    if value is None or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    if not isinstance(value, str) or value.strip().lower() not in TRUTH:
        raise ValueError(f"{name} {shown(value)}: must be true or false")
    return TRUTH[value.strip().lower()]


def _time(values: Mapping[str, Any], name: str, latest: datetime) -> datetime | None:
    """A time that names no zone counts as UTC."""
    value = values.get(name)
    if value is None or value == "":
        return None
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.strip())
        except ValueError:
            raise ValueError(f"{name} {shown(value)}: must be a time as in 2026-03-09T21:52:49Z") from None
    if not isinstance(value, datetime):
        raise ValueError(f"{name} {shown(value)}: must be a time as in 2026-03-09T21:52:49Z")
    try:
        moment = value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"{name} {value}: lies outside the calendar") from None
    if moment > latest:
        raise ValueError(f"{name} {moment:%Y-%m-%dT%H:%M:%SZ}: lies in the future")
    return moment


def _texts(values: Mapping[str, Any], name: str) -> list[str] | None:
    """A list of texts; CSV writes it as JSON into one field."""
    value = values.get(name)
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError(f"{name} {shown(value)}: must be a JSON list of texts") from None
    if value is None or value == "":
        return None
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{name} {shown(value)}: must be a list of texts")
    return value
