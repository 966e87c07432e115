"""What calibrate.py of a bundle reads: queries from text and from JSONL, and which it refuses by place."""

from __future__ import annotations

from pathlib import Path

import pytest

from reflux.components.calibrate.bundle_files.calibrate import read_queries


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("q.txt", "\n \n", "holds no query"),
        ("q.jsonl", '{"text": "a"}\n{"text": \n', "q.jsonl, line 2: no JSON"),
        ("q.jsonl", '{"query": "a"}\n', "q.jsonl, line 1: has no text in a field 'text' or 'prompt'"),
        ("q.jsonl", "[1]\n", "q.jsonl, line 1: has no text"),
    ],
)
def test_queries_that_cannot_be_read_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_queries(tmp_path / name, 100)


def test_queries_come_from_text_and_from_jsonl(tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text("one\n\ntwo\nthree\n")
    assert read_queries(tmp_path / "q.txt", 2) == ["one", "two"]
    (tmp_path / "q.jsonl").write_text('{"prompt": "one"}\n{"text": "two"}\n')
    assert read_queries(tmp_path / "q.jsonl", 100) == ["one", "two"]
