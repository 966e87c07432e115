"""Files of weights by their headers alone, which say in seconds what a model is and whether it is whole.

In place of such a file stands one of the same length that has its header and, behind it, a hole: it can neither be
loaded nor digested, and takes no room on a disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from reflux.components import gguf_header
from reflux.components.gguf_header import Read

_LONGEST_SAFETENSORS = 100_000_000  # bytes, of the format itself


def is_weights(name: str) -> bool:
    """Whether a file of that name can be known by its header."""
    return Path(name).suffix in _HEADERS


def write(read: Read, size: int, path: Path) -> None:
    """The stand-in at `path` of a file of `size` bytes; its suffix says of which format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_HEADERS[path.suffix](lambda count: read(min(count, size)) if size else b""))
    os.truncate(path, size)


def _safetensors(read: Read) -> bytes:
    """Eight bytes that give the length of the JSON behind them."""
    return read(min(8 + int.from_bytes(read(8), "little"), _LONGEST_SAFETENSORS))


_HEADERS: dict[str, Callable[[Read], bytes]] = {".safetensors": _safetensors, ".gguf": gguf_header.header}
