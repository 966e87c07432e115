"""What a question in an annotation tool asks about, by its name, and what one person's answers are as plain rows.

One convention for every tool: `rating_2` rates step 2, and so do `overload_2`, `guardrail_2`, `comment_2` and `flags_2`
(a list of choices); `key_tokens` marks spans of the answer. Without a number, the record itself has to name the step.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from reflux.components.record_formats import KEPT_CHARACTERS
from reflux.components.records import Record

KEY_TOKENS = "key_tokens"
FLAGS = ("overload", "guardrail")
ALLOWED = "rating_STEP, overload_STEP, guardrail_STEP, flags_STEP, comment_STEP and key_tokens"
_NAME = re.compile(r"(rating|overload|guardrail|flags|comment)(?:_(?:step_)?([0-9]{1,6}))?")


@dataclass(frozen=True, kw_only=True)
class Submission:
    """What one person said about one answer at one time."""

    annotator: Any
    submitted_at: Any
    about: dict[str, Any]
    """trace_id, prompt_id, step, response and steps, as far as the export names them."""
    answers: list[tuple[str, Any]] = field(default_factory=list)
    """(name of the question, answer)"""
    marks: list[dict[str, Any]] = field(default_factory=list)
    """start, end, mark and, where the tool gives it, marked_text: spans of the response."""


def rows(record: Record, submission: Submission) -> Iterator[Record]:
    """The plain rows of a submission: one per rated step, one per mark, and one with what was not understood."""
    common = {"annotator": submission.annotator, "submitted_at": submission.submitted_at}
    if not submission.answers and not submission.marks:
        yield refused(record, "submission: holds no answer", common)
    by_step: dict[str, dict[str, Any]] = defaultdict(dict)
    unknown = []
    for name, answer in submission.answers:
        found = _NAME.fullmatch(name)
        if found is None:
            unknown.append(name)
            continue
        step = submission.about.get("step") if found[2] is None else int(found[2])
        said = by_step[repr(step)]
        said["step"] = step
        if found[1] == "flags":
            choices = answer if isinstance(answer, list) else [answer]
            said |= {flag: flag in choices for flag in FLAGS}
            unknown += [f"{name}: {choice}" for choice in choices if choice not in FLAGS]
        else:
            said[found[1]] = _single(answer)
    about = {name: submission.about.get(name) for name in ("trace_id", "prompt_id")}
    for said in by_step.values():
        yield piece(record, about | common | said, steps=submission.about.get("steps"))
    for mark in submission.marks:
        yield piece(record, about | common | mark, response=submission.about.get("response"))
    if unknown:
        yield refused(record, f"questions {', '.join(unknown)[:200]}: allowed are {ALLOWED}", about | common)


def piece(record: Record, values: dict[str, Any], **unshown: Any) -> Record:
    """A plain row out of an exported record; `unshown` are values too long to repeat in the table of refused rows."""
    return Record(source=record.source, row=record.row, text=_text(values), values=values | unshown)


def refused(record: Record, reason: str, values: dict[str, Any] | None = None) -> Record:
    """A row for the quarantine alone."""
    return Record(source=record.source, row=record.row, text=_text(values) if values else record.text, problem=reason)


def mappings(values: Any) -> Iterable[dict[str, Any]]:
    """The dicts of a list, which is what exports hold at most places; nothing of anything else."""
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _single(answer: Any) -> Any:
    """Choices and text areas answer with lists, also where there is one answer."""
    if isinstance(answer, list) and len(answer) == 1:
        return answer[0]
    if isinstance(answer, list) and answer and all(isinstance(line, str) for line in answer):
        return "\n".join(answer)
    return answer


def _text(values: dict[str, Any]) -> str:
    return json.dumps(values, ensure_ascii=False, default=str)[:KEPT_CHARACTERS]
