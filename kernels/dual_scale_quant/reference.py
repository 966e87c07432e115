"""Dual-scale quantisation of activations in plain PyTorch: the definition, the CPU path and the kernel's oracle.

A value is rounded to the nearest point of two symmetric integer grids: the main grid, fine, for nearly all values,
and the outlier grid, whose step follows the token's largest value. Which grid a value is on costs one flag bit. All
arithmetic is in float32, whatever the dtype of the values. Shapes: N tokens (any leading dimensions), D channels.
"""

from __future__ import annotations

from typing import Any

import torch


def largest_code(bits: int) -> int:
    """The largest code of a symmetric grid: 7 for 4 bits, so that a grid and its mirror image are the same."""
    return 2 ** (bits - 1) - 1


def outlier_scale(x_ND: torch.Tensor, main_scale_N1: torch.Tensor, bits: int) -> torch.Tensor:
    """[N, 1] step of the outlier grid: the token's largest |x| falls on the largest code, never finer than the main
    grid. Not finite if the token is not.
    """
    return torch.maximum(x_ND.abs().amax(-1, keepdim=True).float() / largest_code(bits), main_scale_N1.float())


def quantize(
    x_ND: torch.Tensor, main_scale_N1: torch.Tensor, outlier_scale_N1: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [N, D] int8 and the flag [N, D] of those that count outlier steps. A tie goes to the main grid."""
    top = largest_code(bits)
    x_ND, main_scale_N1 = x_ND.float(), main_scale_N1.float()
    main_ND = (x_ND / main_scale_N1).round_().clamp_(-top, top)
    outlier_ND = (x_ND / outlier_scale_N1).round_().clamp_(-top, top)
    main_error_ND = (main_ND * main_scale_N1).sub_(x_ND).abs_()
    outlier_error_ND = (outlier_ND * outlier_scale_N1).sub_(x_ND).abs_()
    is_outlier_ND = outlier_error_ND < main_error_ND
    return torch.where(is_outlier_ND, outlier_ND, main_ND).to(torch.int8), is_outlier_ND


def dequantize(
    codes_ND: torch.Tensor, is_outlier_ND: torch.Tensor, main_scale_N1: torch.Tensor, outlier_scale_N1: torch.Tensor
) -> torch.Tensor:
    """[N, D] float32 values of the codes on their grids; a token that was not finite is NaN, not a finite value."""
    main_scale_N1 = main_scale_N1.float().where(outlier_scale_N1.isfinite(), torch.nan)
    return codes_ND.float() * torch.where(is_outlier_ND, outlier_scale_N1, main_scale_N1)


class DualScale(torch.autograd.Function):
    """Values and gradients as the package states them, for scales that have the leading dimensions of x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, main_scale: torch.Tensor, bits: int) -> torch.Tensor:
        outlier = outlier_scale(x, main_scale, bits)
        codes, is_outlier = quantize(x, main_scale, outlier, bits)
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(x, main_scale, codes, is_outlier)
            ctx.top = largest_code(bits)
        return dequantize(codes, is_outlier, main_scale, outlier).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        if not ctx.needs_input_grad[1]:
            return grad, None, None
        x, main_scale, codes, is_outlier = ctx.saved_tensors
        ratio = x.float() / main_scale.float()
        inside = torch.where(ratio.abs() < ctx.top, ratio, 0)
        step = torch.where(is_outlier, 0, codes - inside)
        return grad, (grad * step).sum(-1, keepdim=True).to(main_scale.dtype), None
