"""The table's file: what is written comes back, and no damaged byte goes unseen."""

from __future__ import annotations

import json
import struct

import pytest
import torch

from reflux.components.algorithms.policies import KNOTS, PositionTable
from reflux.components.bundles.policy_table import MAGIC, VERSION, decode, encode

SITES = ["layers.0.attn_in", "layers.0.down_in"]


def table(knots: tuple[int, ...] = KNOTS, seed: int = 0) -> PositionTable:
    generator = torch.Generator().manual_seed(seed)
    return PositionTable(SITES, torch.rand(len(SITES), len(knots), 2, generator=generator) + 0.01, knots)


def test_a_table_comes_back_and_is_written_the_same():
    policy = table()
    data = encode(policy)
    read = decode(data)
    assert (read.sites, read.knots) == (SITES, KNOTS)
    torch.testing.assert_close(read.scales(), policy.scales(), rtol=1e-6, atol=0)
    assert torch.equal(read.outlier_SP, policy.outlier_SP)
    assert encode(table()) == data  # equal tables, equal bytes


def test_what_is_written_does_not_drift():
    policy = table()
    for _ in range(20):
        policy = decode(encode(policy))
    torch.testing.assert_close(policy.scales(), table().scales(), rtol=1e-6, atol=0)


def test_layout_by_hand():
    data = encode(table((0, 7)))
    magic, version, length = struct.unpack_from("<8sII", data)
    assert (magic, version) == (MAGIC, VERSION)
    header = json.loads(data[48 : 48 + length])
    assert header["sites"] == SITES
    assert header["knots"] == [0, 7]
    assert header["columns"] == ["scale_main", "scale_outlier"]
    assert header["shape"] == [2, 2, 2]
    values = struct.unpack("<8f", data[48 + length :])
    assert values == pytest.approx(table((0, 7)).scales().flatten().tolist())


def test_every_single_damaged_byte_is_seen():
    data = encode(table((0, 1, 16)))
    for place in range(len(data)):
        for flip in (0x01, 0x10, 0x20, 0x80, 0xFF):
            damaged = bytearray(data)
            damaged[place] ^= flip
            with pytest.raises(ValueError, match="policy table"):
                decode(bytes(damaged))


def test_a_knot_or_a_site_changed_by_hand_is_seen():
    data = encode(table())
    for old, new in ((b"1024", b"1025"), (b"layers.0.down_in", b"layers.1.down_in"), (b'", "', b'" ,"')):
        assert old in data
        with pytest.raises(ValueError, match="digest"):
            decode(data.replace(old, new, 1))


def test_a_file_of_any_other_length_is_refused():
    data = encode(table((0, 1)))
    for length in range(len(data)):
        with pytest.raises(ValueError, match="policy table"):
            decode(data[:length])
    with pytest.raises(ValueError, match="digest"):
        decode(data + b"\0")


def test_another_version_and_another_file_are_named():
    data = encode(table())
    with pytest.raises(ValueError, match="format version 77"):
        decode(data[:8] + struct.pack("<I", 77) + data[12:])
    with pytest.raises(ValueError, match=r"begins with b'PK"):
        decode(b"PK\x03\x04" + bytes(100))
