"""A model known by the headers of its weights: what libraries read from a stand-in, how little is fetched."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from reflux.components import gguf_header, weight_headers


def reader(path: Path, asked: list[int]) -> gguf_header.Read:
    def read(count: int) -> bytes:
        asked.append(count)
        return path.read_bytes()[:count]

    return read


def stand_in(path: Path, folder: Path, asked: list[int] | None = None) -> Path:
    made = folder / path.name
    weight_headers.write(reader(path, [] if asked is None else asked), path.stat().st_size, made)
    return made


def write_gguf(path: Path, words: int) -> None:
    """Values of every kind, a vocabulary of so many words, and two tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    for kind in gguf.GGUFValueType:
        if kind not in (gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING):
            value = kind is gguf.GGUFValueType.BOOL or 1
            writer.add_key_value(f"test.{kind.name.lower()}", value, kind)
    writer.add_token_list([f"word {number}" for number in range(words)])
    writer.add_token_scores([0.5] * words)
    writer.add_array("test.nothing", [""])
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), dtype=np.float32))
    writer.add_tensor("output.weight", np.ones((512, 512), dtype=np.float32))
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()


@pytest.mark.parametrize("words", [1, 1000, 70_000])
def test_a_gguf_reader_finds_the_same_in_a_stand_in(tmp_path: Path, words: int) -> None:
    file, asked = tmp_path / "model.gguf", list[int]()
    write_gguf(file, words)
    made = stand_in(file, tmp_path / "stand-in", asked)
    assert made.stat().st_size == file.stat().st_size
    assert made.stat().st_blocks * 512 < file.stat().st_size - 500_000, "the weights are a hole"
    ours, theirs = gguf.GGUFReader(made), gguf.GGUFReader(file)
    assert list(ours.fields) == list(theirs.fields)
    assert all(ours.fields[name].contents() == field.contents() for name, field in theirs.fields.items())
    described = [
        [(t.name, t.tensor_type, t.shape.tolist(), t.data_offset) for t in each.tensors] for each in (ours, theirs)
    ]
    assert described[0] == described[1]
    header = gguf_header.header(reader(file, []))
    assert gguf_header.length(header) == len(header) <= theirs.tensors[0].data_offset < len(header) + 32
    cuts = (0, 3, 23, 24, len(header) // 3, len(header) // 2, len(header) - 1)
    assert [gguf_header.length(header[:cut]) for cut in cuts] == [None] * len(cuts)


@pytest.mark.parametrize(
    "content", [b"", b"GG", b"<html>", b"GGUF\x09\0\0\0" + bytes(16), b"GGUF\x03\0\0\0" + b"\xff" * 64]
)
def test_what_is_no_gguf_file_stays_what_it_is(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    assert stand_in(tmp_path / "model.gguf", tmp_path / "stand-in").read_bytes() == content


def test_a_damaged_header_is_not_read_for_ever() -> None:
    """A list of 2^60 texts."""
    many = b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little")
    many += (
        (1).to_bytes(8, "little")
        + b"k"
        + (9).to_bytes(4, "little")
        + (8).to_bytes(4, "little")
        + (1 << 60).to_bytes(8, "little")
    )
    asked: list[int] = []

    def endless(count: int) -> bytes:
        asked.append(count)
        return many + bytes([255]) * (count - len(many))

    assert len(gguf_header.header(endless)) == asked[-1]
    assert len(asked) < 8
