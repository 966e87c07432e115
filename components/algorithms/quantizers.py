"""Fake quantisation of weights and activations, and what a quantised value costs in bits.

Weights: symmetric, per group of consecutive input channels, rounded to nearest, scale in float16 as it is stored.
Activations: `plain` has one dynamic scale per token; `dual` adds a second grid for outliers
(kernels/dual_scale_quant). Gradients pass straight through. Shapes: O outputs, I inputs, G groups of a row, S inputs
of a group; N tokens, D channels.
"""

from __future__ import annotations

from typing import Any

import torch

from reflux.kernels.dual_scale_quant import dual_scale_quant, largest_code

SCALE_BITS = 16  # scales are stored as float16
SMALLEST_SCALE = 2.0**-14  # the smallest normal float16: a group of zeros keeps a usable scale


def check_group_size(group_size: int, columns: int) -> None:
    """ValueError if groups of that size do not fill the `columns` input channels of a layer."""
    if columns % group_size:
        raise ValueError(f"group_size {group_size}: must divide the {columns} input channels of every layer")


def weight_codes(weight_OI: torch.Tensor, bits: int, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 [O, I] in [−2^(b−1), 2^(b−1) − 1] and scales [O, G] (float16 values). ValueError if the group does
    not divide I.
    """
    rows, columns = weight_OI.shape
    check_group_size(group_size, columns)
    grouped_OGS = weight_OI.reshape(rows, columns // group_size, group_size)
    half_steps = 2**bits - 1  # the grid is one code longer below zero, so its half width is (2^b − 1) / 2 steps
    scale_OG = grouped_OGS.abs().amax(-1) * 2 / half_steps
    scale_OG = scale_OG.to(torch.float16).to(weight_OI.dtype).clamp(min=SMALLEST_SCALE)
    lowest = -(2 ** (bits - 1))
    codes_OGS = (grouped_OGS / scale_OG[..., None]).round_().clamp_(lowest, -lowest - 1)
    return codes_OGS.to(torch.int8).reshape(rows, columns), scale_OG


def weight_values(codes_OI: torch.Tensor, scale_OG: torch.Tensor) -> torch.Tensor:
    """[O, I] the weights that codes and scales stand for."""
    rows, groups = scale_OG.shape
    return (codes_OI.reshape(rows, groups, -1) * scale_OG[..., None]).reshape(rows, -1)


def fake_quantize_weight(weight_OI: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """The weight as it will be deployed; the gradient reaches the master weight unchanged."""
    return _RoundWeight.apply(weight_OI, bits, group_size)


class _RoundWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_OI: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
        return weight_values(*weight_codes(weight_OI, bits, group_size))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], None, None


def plain(x: torch.Tensor, main_scale: torch.Tensor | None, bits: int) -> torch.Tensor:
    """One dynamic scale per token: the largest |x| of the token falls on the largest code."""
    top = largest_code(bits)
    scale = (x.detach().abs().amax(-1, keepdim=True) / top).clamp(min=SMALLEST_SCALE)
    return x + ((x / scale).round().clamp(-top, top) * scale - x).detach()


def dual(x: torch.Tensor, main_scale: torch.Tensor | None, bits: int) -> torch.Tensor:
    """Main scale from the policy, outlier scale from the token itself."""
    assert main_scale is not None, "dual-scale quantisation needs the policy's main scale"
    return dual_scale_quant(x, main_scale, bits)


QUANTIZERS = {"plain": plain, "dual": dual}
FLAG_BITS = {"plain": 0, "dual": 1}  # which grid a value is on


def effective_weight_bits(bits: int, group_size: int) -> float:
    """Bits per weight with its share of the group's scale."""
    return bits + SCALE_BITS / group_size


def effective_activation_bits(activation: str, bits: int, channels: int) -> float:
    """Bits per value of a token of `channels` values: code, flag and the token's dynamic scale (the main scale is a
    table, shared).
    """
    return bits + FLAG_BITS[activation] + SCALE_BITS / channels
