"""One way to write a value as bytes, so that equal values have equal digests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def canonical(value: Any) -> bytes:
    """JSON with sorted names, no spaces, UTF-8. A whole float is written as an integer: 1 and 1.0 are one value.

    ValueError for what JSON cannot hold without loss: NaN, infinities, names that are not strings.
    """
    return json.dumps(
        _plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _plain(value: Any) -> Any:
    """The value in JSON's own types. Whole floats below 2**53, where every integer is a float, become integers."""
    if isinstance(value, Mapping):
        if wrong := [name for name in value if not isinstance(name, str)]:
            raise ValueError(f"name {wrong[0]!r}: JSON names are strings")
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value
