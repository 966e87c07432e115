"""Who was champion when, and why: one numbered record after the other in the store, none of which ever changes.

The record with the next number is a conditional PUT, so of two promotions at once exactly one gets it; the other reads
it and judges anew, against the new champion. That is the lock, and nobody can die holding it. MLflow has no conditional
change of an alias: comparing before and after would leave a moment in which both believe that they won.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from reflux.components.storage import Store


@dataclass(frozen=True, kw_only=True)
class Record:
    """One change of champion."""

    number: int
    """From 1, without gaps."""
    champion: int
    """Version of the model."""
    previous: int | None
    """The champion before it."""
    why: str
    """first, better, forced or rollback"""
    reason: str
    """In words, of the person who asked; may be empty unless it was forced."""
    metric: str = ""
    value: float | None = None
    """Of the new champion, on `metric`."""
    previous_value: float | None = None
    at: str = ""
    """UTC, ISO 8601."""


def read(store: Store, model: str) -> list[Record]:
    """All records of a model, the oldest first."""
    return [Record(**json.loads(store.read(key))) for key in store.list(_folder(model))]


def append(store: Store, model: str, record: Record) -> bool:
    """Whether it became the next record; False if somebody else's did."""
    key = f"{_folder(model)}/{record.number:06d}.json"
    return store.create(key, (json.dumps(asdict(record), indent=2) + "\n").encode())


def _folder(model: str) -> str:
    return f"promotions/{model}"
