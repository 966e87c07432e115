"""Rows of users' files: what is read, and how a bad file or row is named."""

from __future__ import annotations

import gzip
import json
import re
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reflux.components import record_files
from reflux.components.record_formats import KEPT_CHARACTERS, MAX_ROW_BYTES
from reflux.components.records import read_records, read_text_field

ROWS = [{"prompt": "Grüße, 你好 \u2028!", "prompt_id": "a"}, {"prompt": 'two\nlines, "quoted"', "prompt_id": "b"}]


def as_jsonl(folder: Path) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("\ufeff" + "\r\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS), "utf-8")
    return file


def as_csv(folder: Path) -> Path:
    file = folder / "rows.csv"
    file.write_text('prompt,prompt_id\n"Grüße, 你好 \u2028!",a\n"two\nlines, ""quoted""",b\n', "utf-8")
    return file


def as_parquet(folder: Path) -> Path:
    file = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), file)
    return file


def as_gzip(folder: Path) -> Path:
    file = folder / "rows.JSONL.gz"
    file.write_bytes(gzip.compress(as_jsonl(folder).read_bytes()))
    return file


@pytest.mark.parametrize("write", [as_jsonl, as_csv, as_parquet, as_gzip])
def test_every_format_gives_the_same_rows(write: Callable[[Path], Path], tmp_path: Path) -> None:
    file = write(tmp_path)
    assert [record.values for record in read_records(file)] == ROWS
    assert {record.source for record in read_records(file)} == {file.name}


def test_a_folder_is_read_in_name_order_without_markers(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "_SUCCESS", ".part.crc"):
        (tmp_path / name).write_text(json.dumps({"from": name}) + "\n")
    assert [record.values["from"] for record in read_records(tmp_path)] == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"a": 1', "not a JSON object: .* at column"),
        ("[1, 2]", "not a JSON object but a list"),
        ("null", "not a JSON object but a NoneType"),
        ('{"a": "\\ud800"}', "surrogates not allowed"),
        ('{"a": ' + "9" * 5000 + "}", "not a usable JSON object"),
        ("[" * 100_000, "not a usable JSON object"),
        ('{"a": ' * 100_000, "not a usable JSON object"),
        ('{"a": 1, "b": 2, "a": 3}', "the name 'a' stands twice in it"),
        ('{"a": "' + "x" * 10_000_000 + '"}', "10,000,010 bytes in one row; at most 1,048,576 are read"),
    ],
)
def test_a_bad_line_keeps_its_number_and_its_beginning(line: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n' + line + '\n{"a": 3}\n')
    good, bad, also_good = read_records(file)
    assert (good.row, also_good.row) == (1, 3)
    assert bad.row == 2
    assert bad.text == line[:KEPT_CHARACTERS]
    assert bad.values == {}
    assert re.search(problem, bad.problem)


def test_a_line_in_another_encoding_is_a_problem_of_that_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"a": 1}\n{"a": "caf\xe9"}\r\n\xef\xbb\xbf{"a": 3}')
    good, bad, joined_by_cat = read_records(file)
    assert (good.values, joined_by_cat.values) == ({"a": 1}, {"a": 3})
    assert (bad.row, bad.text, bad.problem) == (
        2, '{"a": "caf\ufffd"}', "not UTF-8 (byte 0xe9); save it as UTF-8",
    )  # fmt: skip


def test_a_row_of_the_largest_size_is_read(tmp_path: Path) -> None:
    value = "x" * (MAX_ROW_BYTES - len('{"a": ""}\n'))
    for name, content in {"rows.jsonl": json.dumps({"a": value}) + "\n", "rows.csv": f"a\n{value}\n"}.items():
        (tmp_path / name).write_text(content)
        (record,) = read_records(tmp_path / name)
        assert record.values == {"a": value}


def test_the_members_of_a_zip_archive_are_read_in_their_order(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "export.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("b/rows.csv", "a\n1\n")
        archive.writestr("__MACOSX/b/._rows.csv", b"\x00\x05\x16\x07")
        archive.writestr("a/rows.jsonl", '{"a": 2}\n{"a": \n')
    first, second, bad = read_records(tmp_path / "export.zip")
    assert (first.place, first.values) == ("export.zip/b/rows.csv, row 2", {"a": "1"})
    assert (second.place, second.values) == ("export.zip/a/rows.jsonl, row 1", {"a": 2})
    assert bad.problem.startswith("not a JSON object")


def zipped(name: str, content: bytes) -> bytes:
    with tempfile.TemporaryFile() as stream:
        with zipfile.ZipFile(stream, "w") as archive:
            archive.writestr(name, content)
        stream.seek(0)
        return stream.read()


def encrypted(archive: bytes) -> bytes:
    """The flag alone, in both headers: enough for a reader to ask for a password."""
    data = bytearray(archive)
    data[6] |= 1
    data[data.index(b"PK\x01\x02") + 8] |= 1
    return bytes(data)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl.gz", gzip.compress(b"{}\n" * 99)[:-12], "rows.jsonl.gz: cannot be read to its end"),
        ("rows.jsonl.gz", b'{"a": 1}\n', "rows.jsonl.gz: cannot be read to its end .*Not a gzipped"),
        ("rows.parquet.gz", b"", "rows.parquet: Parquet within an archive is not read"),
        ("rows.zip", b"PK no archive", "rows.zip: not a readable zip archive"),
        ("rows.zip", zipped("rows.xlsx", b""), "rows.zip/rows.xlsx: unknown kind of file"),
        ("rows.zip", zipped("x", b"").replace(b"x", b"\0"), "rows.zip/: unknown kind of file"),
        ("rows.zip", zipped("more.zip", b""), "rows.zip/more.zip: unknown kind of file"),
        ("rows.zip", zipped("rows.parquet", b""), "rows.zip/rows.parquet: Parquet within an archive"),
        ("rows.zip", encrypted(zipped("rows.csv", b"a\n1\n")), "rows.zip/rows.csv: is encrypted; unpack it"),
        ("rows.zip", zipped("rows.csv", b"a\n1\n").replace(b"a\n1", b"a\n2"), "rows.csv: cannot be read"),
    ],
)
def test_an_archive_that_cannot_be_read_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_records(tmp_path / name))


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.zip"])
def test_what_an_archive_unpacks_to_is_limited(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_files, "MAX_UNPACKED_BYTES", 3 * MAX_ROW_BYTES)
    content = b" " * (4 * MAX_ROW_BYTES)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else zipped("rows.csv", content))
    with pytest.raises(ValueError, match=rf"{name}: unpacks to .*3,145,728"):
        list(read_records(tmp_path / name))


def test_a_csv_row_of_another_width_is_a_problem_of_that_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("a,b\n1\n2,3\n4,5,6\n")
    assert [(record.row, record.problem) for record in read_records(file)] == [
        (2, "1 fields under a header of 2"),
        (3, ""),
        (4, "3 fields under a header of 2"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", b"a\n1\n\xe9\n", r"rows.csv, line 3: not UTF-8 \(byte 0xe9\)"),
        ("rows.jsonl", '{"a": 1}\n'.encode("utf-16"), "rows.jsonl, line 1: not UTF-8"),
        ("rows.csv", "a,b\n1,2\n".encode("utf-16"), "rows.csv, line 1: not UTF-8"),
        ("rows.csv", b"a,a\n1,2\n", "rows.csv: the header names a column twice: a, a"),
        ("rows.csv", b"a\n" + b"x" * 10_000_000, "rows.csv, line 2: 10,000,000 bytes in one row"),
        ("rows.csv", b'a\n1\n"' + b"x\n" * MAX_ROW_BYTES, r"rows.csv, line 3: not CSV \(field larger"),
        ("rows.csv", b'a\n1\n"2\n3\n', r"rows.csv, line 3: not CSV \(unexpected end of data"),
        ("rows.parquet", b"PAR1 not really", "rows.parquet: not a readable Parquet file"),
        ("rows.xlsx", b"", "rows.xlsx: unknown kind of file; allowed are .jsonl"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_records(tmp_path / name))


def test_text_fields_are_text_or_whole_numbers() -> None:
    assert read_text_field({"id": " x "}, "id") == "x"
    assert read_text_field({"id": 7}, "id") == "7"
    assert read_text_field({"id": None}, "id") == read_text_field({}, "id") == ""
    refused: list[Any] = [True, 1.5, ["x"], {}]
    for value in refused:
        with pytest.raises(ValueError, match=r"id .*: must be text or a whole number"):
            read_text_field({"id": value}, "id")


def test_a_parquet_cell_that_python_cannot_hold_spoils_no_row(tmp_path: Path) -> None:
    columns = {
        "prompt": pa.array(["a", "b"], pa.large_string()),
        "kind": pa.array(["x", None]).dictionary_encode(),
        "when": pa.array([2**62, 0], pa.timestamp("us")),  # the first lies beyond Python's calendar
        "raw": pa.array([b"\xff", b""], pa.binary()),
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    first, second = read_records(tmp_path / "rows.parquet")
    assert (first.values["prompt"], first.values["kind"], first.values["raw"]) == ("a", "x", b"\xff")
    assert second.values["kind"] is None
    assert second.values["when"].year == 1970
    with pytest.raises(ValueError, match=r"when Unreadable\(.*: must be text"):
        read_text_field(first.values, "when")
