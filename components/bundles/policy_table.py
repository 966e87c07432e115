"""The position table as a file: what profile_kv writes first, distill learns, and a bundle carries as policy_table.bin.

Layout, little-endian: 8 bytes magic, uint32 format version, uint32 length of the header, 32 bytes sha256 of
everything else in the file, the header as JSON (sites, knots, columns, shape), the table as float32 in C order. A knot
that changed unseen would move every scale, so the digest covers the header as well.
"""

from __future__ import annotations

import hashlib
import json
import struct

import torch

from reflux.components.algorithms.policies import PositionTable

MAGIC = b"RFXTABLE"
VERSION = 2
COLUMNS = ["scale_main", "scale_outlier"]
_PREFIX = struct.Struct("<8sII")
_DIGEST_BYTES = 32


def encode(policy: PositionTable) -> bytes:
    """The bytes of a table; equal tables give equal bytes."""
    table = policy.scales().contiguous().cpu().numpy().astype("<f4").tobytes()
    header = json.dumps(
        {
            "sites": policy.sites,
            "knots": list(policy.knots),
            "columns": COLUMNS,
            "shape": [len(policy.sites), len(policy.knots), len(COLUMNS)],
            "dtype": "float32",
        },
        sort_keys=True,
    ).encode()
    prefix = _PREFIX.pack(MAGIC, VERSION, len(header))
    return prefix + hashlib.sha256(prefix + header + table).digest() + header + table


def decode(data: bytes) -> PositionTable:
    """The table in `data`. ValueError if it is no table, of another version, cut short or changed."""
    if len(data) < _PREFIX.size or not data.startswith(MAGIC):
        raise ValueError(f"policy table: begins with {data[:8]!r}, a table begins with {MAGIC!r}")
    _, version, length = _PREFIX.unpack_from(data)
    if version != VERSION:
        raise ValueError(f"policy table: format version {version}, this reflux reads {VERSION}")
    prefix, body = data[: _PREFIX.size], data[_PREFIX.size + _DIGEST_BYTES :]
    if hashlib.sha256(prefix + body).digest() != data[_PREFIX.size :][:_DIGEST_BYTES]:
        raise ValueError("policy table: its digest is not that of its content: it was cut short or changed")
    header = json.loads(body[:length])
    scales = torch.frombuffer(bytearray(body[length:]), dtype=torch.float32).reshape(header["shape"])
    return PositionTable(header["sites"], scales, tuple(header["knots"]))
