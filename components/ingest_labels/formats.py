"""From whatever a person exported to plain rows: a tool is recognised by what a record holds, not by a file's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from reflux.components.ingest_labels import argilla, label_studio, mlflow_feedback
from reflux.components.ingest_labels.export_files import read_exports
from reflux.components.records import Record

FORMATS: dict[str, tuple[Callable[[Mapping[str, Any]], bool], Callable[[Record], Iterator[Record]]]] = {
    "Label Studio": (label_studio.recognises, label_studio.unfold),
    "Argilla": (argilla.recognises, argilla.unfold),
    "MLflow": (mlflow_feedback.recognises, mlflow_feedback.unfold),
}


def plain_rows(path: Path) -> Iterator[Record]:
    """Rows in the plain form that `validation` reads, in file order; of an export, one row per rated step or mark."""
    for record in read_exports(path):
        unfold = next((unfold for recognises, unfold in FORMATS.values() if recognises(record.values)), None)
        if unfold is None or record.problem:
            yield record
        else:
            yield from unfold(record)
