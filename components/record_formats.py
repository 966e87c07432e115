"""JSON lines, CSV and Parquet as rows, one at a time, whatever stands in them.

Reading never guesses and never stops at a row that can be told from its neighbours: such a row comes with its problem.
Where the neighbours would be in doubt too (a quote that never closes, bytes that are no UTF-8 in a CSV file), the file
is refused, with the line.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from reflux.components.record_files import Part

KEPT_CHARACTERS = 2000
"""Of a row's text: enough to recognise it, not enough to copy a document into a table of errors."""
MAX_ROW_BYTES = 2**20
"""Of one row or cell: some 250,000 tokens, more than any context that is asked for."""
SKIPPED_BYTES = 2**20  # of an overlong line, read and dropped at once
BATCH_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class Row:
    number: int
    """Line of a text file in which the row begins, or row of a Parquet file, from 1."""
    text: str
    """As read, cut to KEPT_CHARACTERS."""
    values: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    """Why there are no values."""


@dataclass(frozen=True)
class Unreadable:
    """A Parquet cell that Python cannot hold (a date beyond its calendar, bytes that are no text). It stands in the
    row, so that only a reader who needs this very cell refuses it.
    """

    reason: str


def json_lines(part: Part) -> Iterator[Row]:
    """One row per line that is not blank."""
    for number, line, length in _lines(part):
        if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise ValueError(f"{part.name}, line 1: {_not_utf8(line, 0)}")
        if length > MAX_ROW_BYTES:
            yield Row(number=number, text=_beginning(line), problem=_too_long(length))
            continue
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            yield Row(number=number, text=_beginning(line), problem=_not_utf8(line, error.start))
            continue
        text = text.lstrip("\ufeff").rstrip("\r\n")  # files joined by cat have a byte order mark in the middle
        if text.strip():
            values, problem = _parsed(text)
            yield Row(number=number, text=text[:KEPT_CHARACTERS], values=values, problem=problem)


def _parsed(line: str) -> tuple[dict[str, Any], str]:
    try:
        values = json.loads(line, object_pairs_hook=_object)
        json.dumps(values, ensure_ascii=False).encode()  # an escaped lone surrogate parses, but is not text
    except json.JSONDecodeError as error:
        return {}, f"not a JSON object: {error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:
        return {}, f"not a usable JSON object: {error}"
    if not isinstance(values, dict):
        return {}, f"not a JSON object but a {type(values).__name__}"
    return values, ""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the name {twice[:60]!r} stands twice in it")
    return values


def csv_rows(part: Part) -> Iterator[Row]:
    """One row per record under the header, the first line; its names lose their outer white space."""
    csv.field_size_limit(MAX_ROW_BYTES)  # of this process; the default would refuse a prompt of 130 kB
    reader = csv.reader(_text_lines(part), strict=True)  # strict: an open quote must not swallow the rows behind it
    number = 1
    try:
        header = [name.strip() for name in next(reader, [])]
        if len(set(header)) < len(header):
            raise ValueError(f"{part.name}: the header names a column twice: {', '.join(header)}")
        number = reader.line_num + 1
        for cells in reader:
            if cells:
                text = json.dumps(cells, ensure_ascii=False)[:KEPT_CHARACTERS]
                if len(cells) == len(header):
                    yield Row(number=number, text=text, values=dict(zip(header, cells, strict=True)))
                else:
                    problem = f"{len(cells)} fields under a header of {len(header)}"
                    yield Row(number=number, text=text, problem=problem)
            number = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"{part.name}, line {number}: not CSV ({error})") from error


def _text_lines(part: Part) -> Iterator[str]:
    for number, line, length in _lines(part):
        if length > MAX_ROW_BYTES:
            raise ValueError(f"{part.name}, line {number}: {_too_long(length)}")
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{part.name}, line {number}: {_not_utf8(line, error.start)}") from error
        # some spreadsheets end lines with a lone carriage return
        yield from io.StringIO(text.removeprefix("\ufeff") if number == 1 else text, newline="")


def parquet_rows(part: Part) -> Iterator[Row]:
    """One row per row, of any column types."""
    try:
        with pq.ParquetFile(part.stream) as parquet:
            names = parquet.schema_arrow.names
            if len(set(names)) < len(names):
                raise ValueError(f"{part.name}: a column stands twice: {', '.join(names)}")
            number = 0
            for batch in parquet.iter_batches(batch_size=BATCH_ROWS):
                for values in _python_rows(batch):
                    number += 1
                    text = json.dumps(values, ensure_ascii=False, default=str)
                    if len(text) > MAX_ROW_BYTES:
                        yield Row(number=number, text=text[:KEPT_CHARACTERS], problem=_too_long(len(text)))
                    else:
                        yield Row(number=number, text=text[:KEPT_CHARACTERS], values=values)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{part.name}: not a readable Parquet file ({error})") from error


def _python_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    columns = [[_python_value(cell) for cell in column] for column in batch.columns]
    return [dict(zip(batch.schema.names, cells, strict=True)) for cells in zip(*columns, strict=True)]


def _python_value(cell: pa.Scalar) -> Any:
    try:
        return cell.as_py()
    except Exception as error:  # Arrow lists none: it depends on type, value, and which packages are installed
        return Unreadable(str(error))


FORMATS: dict[str, Callable[[Part], Iterator[Row]]] = {
    ".jsonl": json_lines,
    ".ndjson": json_lines,
    ".csv": csv_rows,
    ".parquet": parquet_rows,
}


def _lines(part: Part) -> Iterator[tuple[int, bytes, int]]:
    """Number from 1, bytes and length of each line, its end included; of a line beyond MAX_ROW_BYTES only the first."""
    number = read = 0
    while line := part.stream.readline(MAX_ROW_BYTES + 1):
        number += 1
        length = len(line)
        rest = line
        while length > MAX_ROW_BYTES and rest and not rest.endswith(b"\n") and read + length <= part.limit_bytes:
            rest = part.stream.readline(SKIPPED_BYTES)
            length += len(rest)
        read += length
        if read > part.limit_bytes:
            raise ValueError(f"{part.name}: unpacks to more than {part.limit_bytes:,} bytes, which is the most read")
        yield number, line, length


def _beginning(line: bytes) -> str:
    return line[: 4 * KEPT_CHARACTERS].decode(errors="replace").rstrip("\r\n")[:KEPT_CHARACTERS]


def _too_long(length: int) -> str:
    return f"{length:,} bytes in one row; at most {MAX_ROW_BYTES:,} are read"


def _not_utf8(line: bytes, start: int) -> str:
    return f"not UTF-8 (byte 0x{line[start]:02x}); save it as UTF-8"
