"""Random access to one version of an object of S3, for Parquet's reader.

pyarrow has its own, which neither notices that the object was replaced between two reads nor outlives a store that is
away for more than a moment.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable


class RangeFile(io.RawIOBase):
    """A read-only file of `size` bytes; `fetch(start, length)` gets bytes, and raises if it gets fewer."""

    def __init__(self, size: int, fetch: Callable[[int, int], bytes]) -> None:
        self._size, self._fetch, self._position = size, fetch, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._position)
        length = left if size is None or size < 0 else min(size, left)
        data = self._fetch(self._position, length) if length else b""
        self._position += len(data)
        return data
