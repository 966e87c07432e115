"""Where the header of a GGUF file ends: its metadata, vocabulary included, and the list of its tensors; weights follow.

Of a model of many gigabytes a few megabytes say what it is. Libraries that read the format want the whole file.
Specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections.abc import Callable

Read = Callable[[int], bytes]
"""The first so many bytes of a file, fewer where it is shorter."""

MAGIC = b"GGUF"
LONGEST = 100_000_000
"""Bytes; the vocabularies of the largest models take ten million."""
_FIRST = 1 << 20
"""Bytes asked for at first, in which the headers of small vocabularies end."""
_VERSIONS = (2, 3)
_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of each type of fixed size
_STRING, _ARRAY = 8, 9


def header(read: Read) -> bytes:
    """Of the file behind `read`. What is no GGUF file, or ends within its header, comes as far as it was read: whoever
    parses it says so.
    """
    asked = _FIRST
    while True:
        beginning = read(asked)
        try:
            end = length(beginning)
        except ValueError:
            return beginning
        if end is not None or len(beginning) < asked or asked > LONGEST:
            return beginning[:end]
        asked *= 4


def length(beginning: bytes) -> int | None:
    """Bytes of the header of a file that begins so; None if it goes on beyond what is given.

    ValueError for what is no GGUF file, or one of another version.
    """
    if not beginning.startswith(MAGIC[: len(beginning)]):
        raise ValueError("does not begin with GGUF")
    try:
        _, version, tensors, pairs = struct.unpack_from("<4sIQQ", beginning)
        if version not in _VERSIONS:
            raise ValueError(f"has version {version} of GGUF; read are {' and '.join(map(str, _VERSIONS))}")
        at = struct.calcsize("<4sIQQ")
        for _ in range(pairs):
            at = _after_string(beginning, at)
            (kind,) = struct.unpack_from("<I", beginning, at)
            at = _after_value(beginning, at + 4, kind)
        for _ in range(tensors):
            at = _after_string(beginning, at)
            (dimensions,) = struct.unpack_from("<I", beginning, at)
            at += 4 + 8 * dimensions + 4 + 8  # the sizes, the type, where its weights begin
    except (struct.error, OverflowError):
        return None
    return at if at <= len(beginning) else None


def _after_string(data: bytes, at: int) -> int:
    (size,) = struct.unpack_from("<Q", data, at)
    return at + 8 + int(size)


def _after_value(data: bytes, at: int, kind: int) -> int:
    if kind == _STRING:
        return _after_string(data, at)
    if kind != _ARRAY:
        return at + _size(kind)
    inner, count = struct.unpack_from("<IQ", data, at)
    at += 12
    if inner not in (_STRING, _ARRAY):
        return at + _size(inner) * int(count)
    for _ in range(count):
        at = _after_value(data, at, inner)
    return at


def _size(kind: int) -> int:
    if kind not in _BYTES:
        raise ValueError(f"is damaged: no value has the type {kind}; copy it again")
    return _BYTES[kind]
