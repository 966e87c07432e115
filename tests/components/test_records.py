"""Rows of users' files: what is read, and how a bad file or row is named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reflux.components.records import KEPT_CHARACTERS, read_records, read_text_field

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


@pytest.mark.parametrize("write", [as_jsonl, as_csv, as_parquet])
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
        ("rows.jsonl", b'{"a": 1}\n{"a": "\xe9"}\n', r"rows.jsonl, line 2: not UTF-8 \(byte 0xe9\)"),
        ("rows.csv", "a,b\n1,2\n".encode("utf-16"), "rows.csv, line 1: not UTF-8"),
        ("rows.csv", b"a,a\n1,2\n", "rows.csv: the header names a column twice: a, a"),
        ("rows.csv", b"a\n" + b"x" * 200_000, "rows.csv, line 2: not CSV"),
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
        with pytest.raises(ValueError, match=r"id .*: must be text"):
            read_text_field({"id": value}, "id")
