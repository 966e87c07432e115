"""Dual-scale quantisation of activations in plain PyTorch: the definition, the CPU path and the kernel's oracle.

A value is rounded to the nearest point of two symmetric integer grids: the main grid, fine, for nearly all values,
and the outlier grid, whose step follows the token's largest value. Which grid a value is on costs one flag bit.
Shapes: N tokens, D channels.
"""

from __future__ import annotations

import torch


def largest_code(bits: int) -> int:
    """The largest code of a symmetric grid: 7 for 4 bits, so that a grid and its mirror image are the same."""
    return 2 ** (bits - 1) - 1


def outlier_scale(x_ND: torch.Tensor, main_scale_N1: torch.Tensor, bits: int) -> torch.Tensor:
    """[N, 1] step of the outlier grid: the token's largest |x| falls on the largest code, never finer than the main
    grid.
    """
    return torch.maximum(x_ND.abs().amax(-1, keepdim=True) / largest_code(bits), main_scale_N1)


def quantize(
    x_ND: torch.Tensor, main_scale_N1: torch.Tensor, outlier_scale_N1: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, D] int8 and the flag [N, D] of those that count outlier steps. A tie goes to the main grid."""
    top = largest_code(bits)
    main_ND = (x_ND / main_scale_N1).round_().clamp_(-top, top)
    outlier_ND = (x_ND / outlier_scale_N1).round_().clamp_(-top, top)
    main_error_ND = (main_ND * main_scale_N1).sub_(x_ND).abs_()
    outlier_error_ND = (outlier_ND * outlier_scale_N1).sub_(x_ND).abs_()
    is_outlier_ND = outlier_error_ND < main_error_ND
    return torch.where(is_outlier_ND, outlier_ND, main_ND).to(torch.int8), is_outlier_ND


def dequantize(
    codes_ND: torch.Tensor, is_outlier_ND: torch.Tensor, main_scale_N1: torch.Tensor, outlier_scale_N1: torch.Tensor
) -> torch.Tensor:
    """[N, D] values of the codes on their grids."""
    return codes_ND.to(main_scale_N1.dtype) * torch.where(is_outlier_ND, outlier_scale_N1, main_scale_N1)
