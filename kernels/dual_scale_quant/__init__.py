"""Dual-scale fake quantisation of activations, with straight-through gradients.

Forward: every value goes to the nearest point of two grids (see reference.py). Backward: the gradient passes to x
unchanged, since the outlier grid reaches the token's largest value and nothing is clipped away; the main scale gets
the gradient of learned step sizes (LSQ, arXiv 1902.08153, eq. 3): code − x / scale for values inside the main grid, ±
the largest code for those at its edge.
"""

from __future__ import annotations

from typing import Any

import torch

from .reference import dequantize, largest_code, outlier_scale, quantize

__all__ = ["dequantize", "dual_scale_quant", "largest_code", "outlier_scale", "quantize"]


def dual_scale_quant(x: torch.Tensor, main_scale: torch.Tensor, bits: int) -> torch.Tensor:
    """x [..., D] rounded to the two grids of each token; main_scale [..., 1] > 0. Same shape and dtype as x."""
    return _DualScale.apply(x, main_scale, bits)


class _DualScale(torch.autograd.Function):
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
        inside = torch.where(codes.abs() == ctx.top, 0, x / main_scale)
        step = torch.where(is_outlier, 0, codes - inside)
        return grad, (grad * step).sum(-1, keepdim=True), None
