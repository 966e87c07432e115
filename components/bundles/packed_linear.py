"""A low-bit linear layer as tensors of a file, in the layout that compressed-tensors calls pack-quantized.

    NAME.weight_packed      [O, ceil(I * bits / 32)] int32, codes along the inputs
    NAME.weight_scale       [O, G] float16
    NAME.weight_zero_point  [ceil(O * bits / 32), G] int32, zero points along the outputs; only where there are any
    NAME.weight_shape       [2] int64

A code is shifted by 2^(bits−1) to be unsigned, and so is a zero point, which is a code. They are laid one after the
other, the first in the lowest bits; where `bits` does not divide 32, one may begin in a word and end in the next.

Shapes: O outputs, I inputs, G groups, N rows, M columns of what is packed, W packed words of a row, C codes of a group
of words.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from reflux.components.algorithms.cpu_kernels import CodedWeight
from reflux.components.algorithms.layer_bits import stored_bits

PACKED = ".weight_packed"
BESIDE = (".weight_scale", ".weight_zero_point", ".weight_shape")
"""Ends of the names of a linear's tensors."""
WORD_BITS = 32
WORD_MASK = 2**32 - 1
CODES_AT_ONCE = 2**20
"""That are int64 for a moment: a whole table's would be many times what it takes packed."""


def pack(codes_NM: torch.Tensor, bits: int) -> torch.Tensor:
    """[N, W] int32, W = ceil(M * bits / 32)."""
    return torch.cat([_packed(part_NM, bits) for part_NM in _some_rows(codes_NM, codes_NM.shape[1])])


def unpack(words_NW: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """[N, M] int8 codes of `pack`."""
    return torch.cat([_unpacked(part_NW, bits, columns) for part_NW in _some_rows(words_NW, columns)])


def _some_rows(values_NM: torch.Tensor, columns: int) -> tuple[torch.Tensor, ...]:
    return values_NM.split(max(1, CODES_AT_ONCE // max(1, columns)))


def _packed(codes_NM: torch.Tensor, bits: int) -> torch.Tensor:
    rows, columns = codes_NM.shape
    unsigned_NM = nn.functional.pad(codes_NM.to(torch.int64) + 2 ** (bits - 1), (0, -columns % WORD_BITS))
    unsigned_NGC = unsigned_NM.reshape(rows, -1, WORD_BITS)  # 32 codes fill `bits` words
    words_NGW = torch.zeros(*unsigned_NGC.shape[:2], bits, dtype=torch.int64)
    for code, (word, shift) in enumerate(_places(bits)):
        words_NGW[..., word] |= unsigned_NGC[..., code] << shift & WORD_MASK
        if shift + bits > WORD_BITS:
            words_NGW[..., word + 1] |= unsigned_NGC[..., code] >> (WORD_BITS - shift)
    words_NW = words_NGW.reshape(rows, -1)[:, : -(-columns * bits // WORD_BITS)]
    return torch.where(words_NW >= 2**31, words_NW - 2**32, words_NW).to(torch.int32)


def _unpacked(words_NW: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    words_NW = nn.functional.pad(words_NW.to(torch.int64) & WORD_MASK, (0, -words_NW.shape[1] % bits))
    words_NGW = words_NW.reshape(len(words_NW), -1, bits)
    unsigned_NGC = torch.empty(*words_NGW.shape[:2], WORD_BITS, dtype=torch.int64)
    for code, (word, shift) in enumerate(_places(bits)):
        unsigned_NGC[..., code] = words_NGW[..., word] >> shift
        if shift + bits > WORD_BITS:
            unsigned_NGC[..., code] |= words_NGW[..., word + 1] << (WORD_BITS - shift)
    unsigned_NM = unsigned_NGC.reshape(len(words_NW), -1)[:, :columns] & (2**bits - 1)
    return (unsigned_NM - 2 ** (bits - 1)).to(torch.int8)


def _places(bits: int) -> list[tuple[int, int]]:
    """(word, shift) at which each of 32 codes begins."""
    return [divmod(code * bits, WORD_BITS) for code in range(WORD_BITS)]


def packed_linear(name: str, coded: CodedWeight) -> dict[str, torch.Tensor]:
    """The tensors of the linear layer of that name. Scales have to be float16 values."""
    bits = stored_bits(coded.bits)
    tensors = {
        f"{name}{PACKED}": pack(coded.codes_OI, bits),
        f"{name}.weight_scale": coded.scale_OG.to(torch.float16),
        f"{name}.weight_shape": torch.tensor(coded.codes_OI.shape),
    }
    if coded.zero_OG is not None:
        tensors[f"{name}.weight_zero_point"] = pack(coded.zero_OG.t(), bits).t().contiguous()
    return tensors


def coded_linear(file: Any, name: str, described: dict[str, Any]) -> CodedWeight:
    """What `packed_linear` made tensors of; `described` is the layer's entry in quant_config.json. ValueError if that
    does not describe them.
    """
    bits, zero_point, packed_OW = described["bits"], described["zero_point"], file.get_tensor(f"{name}{PACKED}")
    outputs, inputs = file.get_tensor(f"{name}.weight_shape").tolist()
    if packed_OW.shape[1] != -(-inputs * bits // WORD_BITS):
        raise ValueError(
            f"quant_config.json: {name}: bits {bits}, but model.safetensors has {packed_OW.shape[1]} words for "
            f"{inputs} codes"
        )
    if zero_point not in (0, f"{name}.weight_zero_point"):
        raise ValueError(
            f"quant_config.json: {name}: zero_point {zero_point!r}; allowed are 0 and '{name}.weight_zero_point'"
        )
    zero_OG = None
    if zero_point != 0:
        zero_OG = unpack(file.get_tensor(zero_point).t(), bits, outputs).t().contiguous()
    return CodedWeight(
        bits=bits,
        codes_OI=unpack(packed_OW, bits, inputs),
        scale_OG=file.get_tensor(f"{name}.weight_scale").to(torch.float32),
        zero_OG=zero_OG,
    )
