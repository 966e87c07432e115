"""Rows of a file that a user made, each with the place to point at when something is wrong with it.

Prompts and labels come as JSON lines, CSV or Parquet, one file or a folder of them, plain or packed. A row that cannot
be parsed comes back with its problem, and the stage decides whether that ends the run or puts the row into its table of
rejected rows; a file that cannot be read is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from reflux.components.record_files import DAMAGE, parts
from reflux.components.record_formats import FORMATS
from reflux.components.schemas import REJECTED


@dataclass(frozen=True, kw_only=True)
class Record:
    source: str
    """Base name of the file, and of the member of an archive: export.zip/prompts.jsonl."""
    row: int
    """Line of a text file in which the row begins, or row of a Parquet file, from 1."""
    text: str
    """As read, cut to 2,000 characters."""
    values: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    """Why there are no values."""

    @property
    def place(self) -> str:
        return f"{self.source}, row {self.row}"

    def rejected(self, reason: str) -> dict[str, Any]:
        """This record as a row of the table `rejected`."""
        return {"source": self.source, "row": self.row, "record": self.text, "reason": reason}


def read_records(path: Path) -> Iterator[Record]:
    """Every row of a file, or of a folder's files in name order. ValueError names a file that cannot be read at all."""
    for part in parts(path, FORMATS):
        try:
            for row in FORMATS[part.kind](part):
                yield Record(source=part.name, row=row.number, text=row.text, values=row.values, problem=row.problem)
        except DAMAGE as error:
            raise ValueError(f"{part.name}: cannot be read to its end ({error})") from error


def rejected_table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=REJECTED)


def read_text_field(values: Mapping[str, Any], name: str) -> str:
    """The field's text without outer white space, "" where it is missing; a whole number counts as its digits.

    ValueError for anything else, so that a list or a float never becomes an identifier.
    """
    value = values.get(name)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"{name} {shown(value)}: must be text or a whole number")
    return str(value).strip()


def shown(value: Any) -> str:
    """A value for an error message."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested almost as deeply as Python can, or a number of thousands of digits
        return f"of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
