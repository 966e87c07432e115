"""Everybody's rows, and of what one person said twice the row that counts.

The rule: of one person's rows about one step, the latest by `submitted_at` counts; a row without a time is older than
any with one, and of equally old rows the first in the files counts. Marks are replaced together: of one person's marks
in one answer, those of the latest time count. What does not count stands among the refused rows, with what replaced it.
"""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from reflux.components.ingest_labels.known_traces import Traces
from reflux.components.ingest_labels.validation import Label, Mark, read_row
from reflux.components.records import Record, shown

CLOCK_TOLERANCE = timedelta(days=1)
"""Local times that name no zone read as up to 14 hours early or late."""
_NEVER = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, kw_only=True)
class Ingested:
    labels: list[Label]
    """In file order."""
    marks: list[Mark]
    rejected: list[dict[str, Any]]
    """Rows of the table `rejected`, in file order."""
    repeated: int
    """Of the rejected, those that say what the same person's row says already."""
    replaced: int
    """Of the rejected, those for which another row of the same person counts."""


@dataclass(frozen=True, kw_only=True)
class _Read:
    number: int
    record: Record
    row: Any  # Label or Mark


def join(records: Iterable[Record], traces: Traces, now: datetime | None = None) -> Ingested:
    """Labels and marks of plain rows. Times more than a day after `now` (default: this machine's clock) are refused."""
    latest = (now or datetime.now(UTC)) + CLOCK_TOLERANCE
    rejected: dict[int, dict[str, Any]] = {}
    labels: dict[tuple[Any, ...], list[_Read]] = defaultdict(list)
    marks: dict[tuple[Any, ...], list[_Read]] = defaultdict(list)
    spellings: dict[str, str] = {}
    for number, record in enumerate(records):
        try:
            row = read_row(record, traces, latest)
        except ValueError as error:
            rejected[number] = record.rejected(str(error))
            continue
        # upper case and the code points of an accent do not make another person, whose agreement would be perfect
        person = unicodedata.normalize("NFKC", row.annotator).casefold()
        row = replace(row, annotator=spellings.setdefault(person, row.annotator))
        read = _Read(number=number, record=record, row=row)
        if isinstance(row, Label):
            labels[row.trace_id, row.step, person].append(read)
        else:
            marks[row.trace_id, person].append(read)
    outdone = [*_outdone_labels(labels.values()), *_outdone_marks(marks.values())]
    rejected |= {read.number: read.record.rejected(reason) for read, reason, _ in outdone}
    return Ingested(
        labels=_kept(labels.values(), rejected),
        marks=_kept(marks.values(), rejected),
        rejected=[rejected[number] for number in sorted(rejected)],
        repeated=sum(same for *_, same in outdone),
        replaced=sum(not same for *_, same in outdone),
    )


_Outdone = tuple[_Read, str, bool]
"""A row, why it does not count, and whether the row that counts says the same."""


def _outdone_labels(groups: Iterable[list[_Read]]) -> Iterator[_Outdone]:
    """Of the rows of one person about one step, all but the one that counts."""
    for group in groups:
        counts = max(group, key=lambda read: (_time(read), -read.number))
        for read in group:
            if read is counts:
                continue
            who, place = f"annotator {shown(read.row.annotator)}", counts.record.place
            same = _said(read.row) == _said(counts.row)
            if same:
                yield read, f"{who}: rated this step before, in {place}, in the same way", True
            elif _time(read) < _time(counts):
                yield read, f"{who}: rated this step again later, in {place}, which counts", False
            else:
                yield read, f"{who}: rated this step before, in {place}; no submitted_at says which is later", False


def _outdone_marks(groups: Iterable[list[_Read]]) -> Iterator[_Outdone]:
    """Of the marks of one person in one answer, those of an earlier time, and those made twice."""
    for group in groups:
        newest = max(_time(read) for read in group)
        seen: dict[tuple[Any, ...], _Read] = {}
        for read in group:
            who, span = f"annotator {shown(read.row.annotator)}", (read.row.mark, *read.row.span)
            if _time(read) < newest:
                yield read, f"{who}: marked this answer again later, which counts", False
            elif span in seen:
                yield read, f"{who}: marked this before, in {seen[span].record.place}", True
            else:
                seen[span] = read


def _kept(groups: Iterable[list[_Read]], rejected: dict[int, dict[str, Any]]) -> list[Any]:
    kept = [read for group in groups for read in group if read.number not in rejected]
    return [read.row for read in sorted(kept, key=lambda read: read.number)]


def _time(read: _Read) -> datetime:
    return read.row.submitted_at or _NEVER


def _said(label: Label) -> tuple[Any, ...]:
    return label.rating, label.overload, label.guardrail, label.comment
