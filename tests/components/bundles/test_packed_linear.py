"""A linear layer as tensors of a file: the words of pack-quantized by hand, and that what is written comes back.

Shapes: O outputs, I inputs, G groups, N rows, M columns, W words.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from reflux.components.algorithms.cpu_kernels import CodedWeight
from reflux.components.bundles.packed_linear import coded_linear, pack, packed_linear, unpack


def some_codes(rows: int, columns: int, bits: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (rows, columns), generator=generator, dtype=torch.int8)


@settings(max_examples=50, deadline=None)
@given(bits=st.integers(2, 8), rows=st.integers(1, 4), columns=st.integers(1, 70), seed=st.integers(0, 99))
def test_codes_survive_packing(bits: int, rows: int, columns: int, seed: int) -> None:
    codes_NM = some_codes(rows, columns, bits, seed)
    words_NW = pack(codes_NM, bits)
    assert words_NW.dtype == torch.int32
    assert words_NW.shape == (rows, -(-columns * bits // 32))
    assert torch.equal(unpack(words_NW, bits, columns), codes_NM)


def test_the_first_code_is_in_the_lowest_bits_and_zero_is_the_offset() -> None:
    codes = torch.tensor([[-8, -7, 0, 1, 2, 3, 4, 7, 5]], dtype=torch.int8)
    first, second = pack(codes, 4)[0].tolist()
    assert first & 0xFFFFFFFF == 0xFCBA9810
    assert second & 0xF == 5 + 8
    assert pack(torch.tensor([[-128, 127]], dtype=torch.int8), 8)[0, 0].item() & 0xFFFF == 0xFF00
    of_three_bits = torch.tensor([[*[-4] * 10, 3]], dtype=torch.int8)  # the eleventh begins in bit 30
    assert [word & 0xFFFFFFFF for word in pack(of_three_bits, 3)[0].tolist()] == [0xC0000000, 1]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("outputs", [32, 20])
def test_zero_points_are_packed_along_the_outputs(bits: int, outputs: int, tmp_path: Path) -> None:
    codes_OI, zero_OG = some_codes(outputs, 48, bits), some_codes(outputs, 3, bits, seed=1)
    scale_OG = torch.rand(outputs, 3, generator=torch.Generator().manual_seed(2)).half().float()
    coded = CodedWeight(bits=bits, codes_OI=codes_OI, scale_OG=scale_OG, zero_OG=zero_OG)
    tensors = packed_linear("up", coded)
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {
        "up.weight_packed": torch.int32,
        "up.weight_scale": torch.float16,
        "up.weight_shape": torch.int64,
        "up.weight_zero_point": torch.int32,
    }
    for g in range(3):  # the bits of a column, one zero point after the other, the lowest first
        stream = np.concatenate(
            [(code + 2 ** (bits - 1) >> np.arange(bits)) & 1 for code in zero_OG[:, g].numpy().astype(int)]
        )
        stream = np.pad(stream, (0, -len(stream) % 32)).reshape(-1, 32)
        words = (stream << np.arange(32)).sum(-1).astype(np.uint32).view(np.int32)
        np.testing.assert_array_equal(tensors["up.weight_zero_point"][:, g].numpy(), words)

    save_file(tensors, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        read = coded_linear(file, "up", {"bits": bits, "zero_point": "up.weight_zero_point"})
    assert torch.equal(read.codes_OI, codes_OI)
    assert torch.equal(read.scale_OG, scale_OG)
    assert read.zero_OG is not None
    assert torch.equal(read.zero_OG, zero_OG)


def test_a_symmetric_layer_has_no_zero_points(tmp_path: Path) -> None:
    coded = CodedWeight(bits=4, codes_OI=some_codes(8, 16, 4), scale_OG=torch.ones(8, 1))
    save_file(packed_linear("up", coded), tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == {"up.weight_packed", "up.weight_scale", "up.weight_shape"}
        assert coded_linear(file, "up", {"bits": 4, "zero_point": 0}).zero_OG is None
