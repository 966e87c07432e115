"""The position table as a file: what profile_kv writes first, distill learns, and a bundle carries as policy_table.bin.

Layout, little-endian: 8 bytes magic, uint32 format version, uint32 length of the header, the header as JSON, the
table as float32 in C order. The header names sites, knots, columns and shape and carries the sha256 of the table's
bytes.
"""

from __future__ import annotations

import hashlib
import json
import struct

import torch

from .algorithms.policies import PositionTable

MAGIC = b"RFXTABLE"
VERSION = 1
COLUMNS = ["scale_main", "scale_outlier"]
_PREFIX = struct.Struct("<8sII")


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
            "sha256": hashlib.sha256(table).hexdigest(),
        },
        sort_keys=True,
    ).encode()
    return _PREFIX.pack(MAGIC, VERSION, len(header)) + header + table


def decode(data: bytes) -> PositionTable:
    """The table in `data`. ValueError if it is no table, of another version, cut short or changed."""
    if len(data) < _PREFIX.size or not data.startswith(MAGIC):
        raise ValueError(f"policy table: begins with {data[:8]!r}, a table begins with {MAGIC!r}")
    _, version, length = _PREFIX.unpack_from(data)
    if version != VERSION:
        raise ValueError(f"policy table: format version {version}, this reflux reads {VERSION}")
    body = data[_PREFIX.size :]
    try:
        header = json.loads(body[:length])
        table, shape, sites, knots = body[length:], header["shape"], header["sites"], tuple(header["knots"])
        intact = hashlib.sha256(table).hexdigest() == header["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"policy table: its header cannot be read ({error})") from error
    if not intact:
        raise ValueError("policy table: the digest in its header is not that of the table: it was cut short or changed")
    scales = torch.frombuffer(bytearray(table), dtype=torch.float32).reshape(shape)
    return PositionTable(sites, scales, knots)
