"""Rows of a file that a user made, each with the place to point at when something is wrong with it.

Prompts and labels come as JSON lines, CSV or Parquet, one file or a folder of them. Reading never guesses: a file that
is not UTF-8 or not Parquet is an error, a single row that cannot be parsed comes back with its problem, and the stage
decides whether that ends the run or puts the row into its table of rejected rows.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from reflux.components.schemas import REJECTED

KEPT_CHARACTERS = 2000
"""Of a rejected record: enough to recognise it, not enough to copy a document into a table of errors."""


@dataclass(frozen=True, kw_only=True)
class Record:
    source: str
    """Base name of the file."""
    row: int
    """Line of a text file or row of a Parquet file, from 1."""
    text: str
    """As read, cut to KEPT_CHARACTERS."""
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
    for file in _files(path):
        yield from READERS[file.suffix.lower()](file)


def rejected_table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=REJECTED)


def read_text_field(values: dict[str, Any], name: str) -> str:
    """The field's text without outer white space, "" where it is missing; a whole number counts as its digits.

    ValueError for anything else, so that a list or a float never becomes an identifier.
    """
    value = values.get(name)
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"{name} {shown(value)}: must be text")
    return str(value).strip()


def shown(value: Any) -> str:
    """A value for an error message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _read_jsonl(file: Path) -> Iterator[Record]:
    for row, line in enumerate(_decoded(file).split("\n"), start=1):
        line = line.rstrip("\r")
        if line.strip():
            values, problem = _parsed(line)
            yield Record(source=file.name, row=row, text=line[:KEPT_CHARACTERS], values=values, problem=problem)


def _parsed(line: str) -> tuple[dict[str, Any], str]:
    try:
        values = json.loads(line)
        line.encode()
        json.dumps(values, ensure_ascii=False).encode()  # an escaped lone surrogate parses, but is not text
    except json.JSONDecodeError as error:
        return {}, f"not a JSON object: {error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:
        return {}, f"not a usable JSON object: {error}"
    if not isinstance(values, dict):
        return {}, f"not a JSON object but a {type(values).__name__}"
    return values, ""


def _read_csv(file: Path) -> Iterator[Record]:
    reader = csv.reader(io.StringIO(_decoded(file), newline=""))
    try:
        header = next(reader, [])
        if len(set(header)) < len(header):
            raise ValueError(f"{file.name}: the header names a column twice: {', '.join(header)}")
        for cells in reader:
            if not cells:
                continue
            text = json.dumps(cells, ensure_ascii=False)[:KEPT_CHARACTERS]
            if len(cells) == len(header):
                yield Record(
                    source=file.name, row=reader.line_num, text=text, values=dict(zip(header, cells, strict=True))
                )
            else:
                problem = f"{len(cells)} fields under a header of {len(header)}"
                yield Record(source=file.name, row=reader.line_num, text=text, problem=problem)
    except csv.Error as error:
        raise ValueError(f"{file.name}, line {reader.line_num}: not CSV ({error})") from error


def _read_parquet(file: Path) -> Iterator[Record]:
    try:
        with pq.ParquetFile(file) as parquet:
            row = 0
            for batch in parquet.iter_batches():
                for values in batch.to_pylist():
                    row += 1
                    text = json.dumps(values, ensure_ascii=False, default=str)[:KEPT_CHARACTERS]
                    yield Record(source=file.name, row=row, text=text, values=values)
    except pa.ArrowException as error:
        raise ValueError(f"{file.name}: not a readable Parquet file ({error})") from error


READERS: dict[str, Callable[[Path], Iterator[Record]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _files(path: Path) -> list[Path]:
    if path.is_dir():  # names that begin with _ or . are markers left by other tools
        files = sorted(file for file in path.rglob("*") if file.is_file() and file.name[0] not in "_.")
    else:
        files = [path]
    unknown = [file.name for file in files if file.suffix.lower() not in READERS]
    if unknown:
        raise ValueError(f"{unknown[0]}: unknown kind of file; allowed are {', '.join(READERS)}")
    return files


def _decoded(file: Path) -> str:
    data = file.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{file.name}, line {line}: not UTF-8 (byte 0x{data[error.start]:02x}); save it as UTF-8"
        ) from error
