"""Whatever bytes a user hands over: rows or a clear error, never a traceback; no valid row among bad ones is lost."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux.components.records import Record, read_records

bounded = settings(max_examples=60, deadline=None)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | text
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=6
)
noise = st.binary(max_size=30).filter(lambda line: b"\n" not in line) | values.map(lambda one: json.dumps(one).encode())


def read(name: str, content: bytes) -> list[Record]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, name)
        file.write_bytes(content)
        return list(read_records(file))


def read_or_refused(name: str, content: bytes) -> list[Record] | str:
    """The records, or the message of the one kind of error that a file may lead to."""
    try:
        return read(name, content)
    except ValueError as error:
        return str(error)


def packed(name: str, content: bytes) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(content)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("rows.csv", content)
    return stream.getvalue()


@bounded
@given(
    name=st.sampled_from(["rows.jsonl", "rows.csv", "rows.parquet", "rows.jsonl.gz", "rows.zip"]),
    content=st.binary(max_size=200) | text.map(str.encode) | text.map(lambda one: one.encode("utf-16")),
)
def test_arbitrary_bytes_are_rows_or_a_refusal_that_names_the_file(name: str, content: bytes) -> None:
    outcome = read_or_refused(name, content)
    if isinstance(outcome, str):
        assert outcome.startswith("rows.")
    else:
        assert all(bool(record.values) != bool(record.problem) or record.text for record in outcome)


@bounded
@given(
    name=st.sampled_from(["rows.jsonl.gz", "rows.zip"]),
    place=st.integers(0, 2000),
    byte=st.integers(0, 255),
    rows=st.lists(text, min_size=1, max_size=5),
)
def test_an_archive_with_one_wrong_byte_gives_rows_or_a_refusal(
    name: str, place: int, byte: int, rows: list[str]
) -> None:
    content = bytearray(packed(name, "\n".join(json.dumps({"a": row}) for row in rows).encode()))
    content[place % len(content)] = byte
    outcome = read_or_refused(name, bytes(content))
    assert isinstance(outcome, list) or outcome.startswith("rows.")


@bounded
@given(data=st.data(), valid=st.lists(st.dictionaries(text, values, min_size=1, max_size=3), max_size=5))
def test_no_valid_line_is_lost_among_noise_and_no_line_vanishes(
    data: st.DataObject, valid: list[dict[str, Any]]
) -> None:
    numbered = [row | {"row": i} for i, row in enumerate(valid)]
    lines = data.draw(st.permutations([json.dumps(row).encode() for row in numbered] + data.draw(st.lists(noise))))
    end = data.draw(st.sampled_from([b"\n", b"\r\n"]))
    records = read("rows.jsonl", end.join(lines))
    by_line = {record.row: record for record in records}
    for number, line in enumerate(lines, start=1):
        if line in (json.dumps(row).encode() for row in numbered):
            assert json.dumps(by_line[number].values).encode() == line
        elif line.decode(errors="replace").replace("\ufeff", "").strip():
            assert number in by_line


@bounded
@given(rows=st.lists(st.tuples(text, text), max_size=6), end=st.sampled_from(["\n", "\r\n", "\r"]), mark=st.booleans())
def test_a_csv_file_comes_back_as_it_was_written(rows: list[tuple[str, str]], end: str, mark: bool) -> None:
    stream = io.StringIO(newline="")
    csv.writer(stream, lineterminator=end, quoting=csv.QUOTE_ALL).writerows([("a", "b"), *rows])
    records = read("rows.csv", stream.getvalue().encode("utf-8-sig" if mark else "utf-8"))
    assert [record.values for record in records] == [{"a": a, "b": b} for a, b in rows]


arrow_types = st.sampled_from(
    [
        pa.string(), pa.large_string(), pa.binary(), pa.bool_(), pa.int8(), pa.uint64(), pa.float16(), pa.float64(),
        pa.date32(), pa.timestamp("ns"), pa.timestamp("us", "Europe/Berlin"), pa.duration("ns"), pa.time64("ns"),
        pa.decimal128(20, 3), pa.list_(pa.int16()), pa.struct([("x", pa.string())]), pa.map_(pa.string(), pa.int8()),
    ]
)  # fmt: skip


def column(data: st.DataObject, dtype: pa.DataType, size: int) -> pa.Array:
    """Arbitrary bits of the type, so that dates and numbers are not only the usual ones."""
    if pa.types.is_nested(dtype) or pa.types.is_boolean(dtype) or pa.types.is_float16(dtype):
        samples: list[Any] = [None, *pa.nulls(1, dtype).to_pylist()]
        if pa.types.is_struct(dtype):
            samples.append({"x": "y"})
        elif pa.types.is_list(dtype):
            samples.append([1, None])
        return pa.array(data.draw(st.lists(st.sampled_from(samples), min_size=size, max_size=size)), dtype)
    if pa.types.is_binary(dtype) or pa.types.is_string(dtype) or pa.types.is_large_string(dtype):
        raw = pa.array(data.draw(st.lists(st.binary(max_size=4), min_size=size, max_size=size)), pa.binary())
        target = pa.large_binary() if pa.types.is_large_string(dtype) else pa.binary()
        return pa.Array.from_buffers(dtype, size, raw.cast(target).buffers())
    width = dtype.bit_width // 8
    bits = data.draw(st.binary(min_size=width * size, max_size=width * size))
    return pa.Array.from_buffers(dtype, size, [None, pa.py_buffer(bits)])


@bounded
@given(data=st.data(), types=st.lists(arrow_types, min_size=1, max_size=4), size=st.integers(0, 4))
def test_a_parquet_file_of_any_types_gives_all_its_rows_or_a_refusal(
    data: st.DataObject, types: list[pa.DataType], size: int
) -> None:
    table = pa.table({f"c{i}": column(data, dtype, size) for i, dtype in enumerate(types)} | {"n": list(range(size))})
    stream = io.BytesIO()
    pq.write_table(table, stream)
    outcome = read_or_refused("rows.parquet", stream.getvalue())
    if isinstance(outcome, str):
        assert outcome.startswith("rows.parquet")
    else:
        assert [record.values["n"] for record in outcome] == list(range(size))
