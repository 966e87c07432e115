"""One row of an expert's file becomes a label, or a reason why it cannot be one.

Exports differ in how they spell numbers and truth values (CSV has only text, spreadsheets write 4.0), so spelling is
read generously and meaning strictly: nothing is rounded, guessed or filled in.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from reflux.components.records import Record, read_text_field, shown

RATINGS = range(1, 6)
NEEDED = (("prompt_id", "trace_id"), ("step",), ("annotator",), ("rating",))
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


class Traces:
    """What labels can refer to: traces by id or by prompt, each with its number of steps.

    `foreseen`: they are still to be made, and `step_starts` holds as many as there can be.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], *, foreseen: bool = False) -> None:
        self.foreseen = foreseen
        self._steps: dict[str, int] = {}
        self._prompts: dict[str, str] = {}
        self._traces: dict[str, str] = {}
        for row in rows:
            self._steps[row["trace_id"]] = len(row["step_starts"])
            self._prompts[row["trace_id"]] = row["prompt_id"]
            self._traces[row["prompt_id"]] = row["trace_id"]

    def find(self, trace_id: str, prompt_id: str) -> tuple[str, str, int]:
        """Trace, prompt and number of steps. ValueError if neither is known or both do not belong together."""
        if not trace_id and not prompt_id:
            raise ValueError("trace_id, prompt_id: one of them must say what was rated")
        if trace_id and trace_id not in self._steps:
            raise ValueError(f"trace_id {shown(trace_id)}: unknown among {len(self._steps)} traces")
        if prompt_id and prompt_id not in self._traces:
            raise ValueError(f"prompt_id {shown(prompt_id)}: unknown among the prompts of {len(self._steps)} traces")
        found = trace_id or self._traces[prompt_id]
        if prompt_id and self._prompts[found] != prompt_id:
            raise ValueError(
                f"prompt_id {shown(prompt_id)}: the trace named beside it belongs to {self._prompts[found]!r}"
            )
        return found, self._prompts[found], self._steps[found]


def require_columns(records: Iterable[Record]) -> None:
    """ValueError if no row at all has a column that every label needs; rows that only lack a value are not meant."""
    present = {name for record in records for name in record.values}
    if not present:  # an empty file, or one whose rows could not be parsed
        return
    missing = [" or ".join(names) for names in NEEDED if not present & set(names)]
    if missing:
        raise ValueError(f"no column {', '.join(missing)}; it has {', '.join(sorted(present))}")


def read_label(record: Record, traces: Traces) -> Label:
    """ValueError with field, value and what is allowed."""
    if record.problem:
        raise ValueError(record.problem)
    values = record.values
    trace_id, prompt_id, steps = traces.find(read_text_field(values, "trace_id"), read_text_field(values, "prompt_id"))
    step = _whole_number(values, "step")
    if not 0 <= step < steps:
        has = "can have" if traces.foreseen else "has"
        raise ValueError(f"step {step}: the trace {has} {steps} steps, counted from 0")
    rating = _whole_number(values, "rating")
    if rating not in RATINGS:
        raise ValueError(f"rating {rating}: must be a whole number from 1 to 5")
    annotator = read_text_field(values, "annotator")
    if not annotator:
        raise ValueError("annotator: is missing")
    return Label(
        trace_id=trace_id,
        prompt_id=prompt_id,
        step=step,
        annotator=annotator,
        rating=rating,
        overload=_truth(values, "overload"),
        guardrail=_truth(values, "guardrail"),
        comment=read_text_field(values, "comment") or None,
    )


def _whole_number(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        value = int(value.strip().partition(".")[0])
    elif isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} {shown(value)}: must be a whole number")
    return value


def _truth(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name)
    text = "" if value is None else str(value).strip().lower()
    if isinstance(value, float) or text not in TRUTH:
        raise ValueError(f"{name} {shown(value)}: must be true or false")
    return TRUTH[text]
