"""Traces as labelling tasks for Label Studio, whose export `label_studio` reads: the way there and the way back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from reflux.components.ingest_labels.known_traces import step_texts

COLUMNS = ["trace_id", "prompt_id", "dimension", "prompt", "response", "step_starts", "response_char_ends"]
LABELLING_CONFIG = Path(__file__).with_name("label_studio.xml")


def tasks(rows: Iterable[Mapping[str, Any]], limit: int | None = None) -> list[dict[str, Any]]:
    """One task per trace, in the order of a hash of trace_id: the first `limit` are a random sample that a later,
    larger export contains. A row has COLUMNS.
    """
    made = [task(row) for row in rows]
    made.sort(key=lambda one: hashlib.sha256(one["data"]["trace_id"].encode()).digest())
    return made[:limit]


def task(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the annotator sees, and what the label needs to find its way back."""
    shown = {name: row[name] for name in ("trace_id", "prompt_id", "dimension", "prompt", "response")}
    return {"data": {**shown, "steps": [{"text": text} for text in step_texts(row)]}}
