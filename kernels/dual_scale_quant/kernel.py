"""Dual-scale quantisation on a GPU: one program per token, one read of x from memory, one write of the values.

The reference makes eleven passes over [N, D] and keeps codes and flags for backward; here both grids are tried in
registers and backward computes them again from x, which is kept anyway. Arithmetic equals the reference's operation by
operation (division rounded correctly, no fused multiply-add), so that values are equal and not merely close.
Shapes: N tokens, D channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .reference import largest_code

LARGEST_BLOCK = 4096
"""Channels of a token handled at once; longer tokens take several turns, the later ones out of the cache."""


@triton.jit
def round_half_even(x):
    """Integer nearest to x, |x| < 2^22: beyond 2^23 float32 has no fraction, so the addition itself rounds."""
    return (x + 12582912.0) - 12582912.0  # 1.5 * 2^23


@triton.jit
def nearest_point(x, main_scale, outlier_scale, TOP: tl.constexpr):
    """The main code, the value on the nearer grid, and whether that is the outlier grid."""
    main = round_half_even(tl.clamp(tl.div_rn(x, main_scale), -TOP, TOP))
    outlier = round_half_even(tl.clamp(tl.div_rn(x, outlier_scale), -TOP, TOP))
    main_value = main * main_scale
    outlier_value = outlier * outlier_scale
    is_outlier = tl.abs(outlier_value - x) < tl.abs(main_value - x)
    return main, tl.where(is_outlier, outlier_value, main_value), is_outlier


@triton.jit
def forward_kernel(
    x_ptr, main_scale_ptr, values_ptr, outlier_scale_ptr, channels, x_row, x_column,
    TOP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """values [N, D] contiguous and outlier_scale [N] float32 of x [N, D] with strides x_row and x_column."""
    token = tl.program_id(0).to(tl.int64)  # N * D may exceed 2^31
    main_scale = tl.load(main_scale_ptr + token).to(tl.float32)
    column_B = tl.arange(0, BLOCK)
    absmax, broken = 0.0, 0
    for start in range(0, channels, BLOCK):
        within_B = start + column_B < channels
        offset_B = (start + column_B).to(tl.int64) * x_column
        size_B = tl.abs(tl.load(x_ptr + token * x_row + offset_B, mask=within_B, other=0.0).to(tl.float32))
        absmax = tl.maximum(absmax, tl.max(size_B, 0))
        broken += tl.sum(tl.where(size_B < float("inf"), 0, 1), 0)  # NaN compares false; tl.max would drop it
    outlier_scale = tl.maximum(tl.div_rn(absmax, TOP * 1.0), main_scale)
    tl.store(outlier_scale_ptr + token, outlier_scale)
    for start in range(0, channels, BLOCK):
        within_B = start + column_B < channels
        offset_B = (start + column_B).to(tl.int64) * x_column
        x_B = tl.load(x_ptr + token * x_row + offset_B, mask=within_B, other=0.0).to(tl.float32)
        _, value_B, _ = nearest_point(x_B, main_scale, outlier_scale, TOP)
        value_B = tl.where(broken > 0, float("nan"), value_B)
        out_B = values_ptr + token * channels + start + column_B
        tl.store(out_B, value_B, mask=within_B)


@triton.jit
def backward_kernel(
    x_ptr, main_scale_ptr, outlier_scale_ptr, grad_ptr, grad_scale_ptr,
    channels, x_row, x_column, grad_row, grad_column,
    TOP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grad_scale [N] of the main scale, from grad [N, D] of the values."""
    token = tl.program_id(0).to(tl.int64)
    main_scale = tl.load(main_scale_ptr + token).to(tl.float32)
    outlier_scale = tl.load(outlier_scale_ptr + token)
    column_B = tl.arange(0, BLOCK)
    total = 0.0
    for start in range(0, channels, BLOCK):
        within_B = start + column_B < channels
        column64_B = (start + column_B).to(tl.int64)
        x_B = tl.load(x_ptr + token * x_row + column64_B * x_column, mask=within_B, other=0.0).to(tl.float32)
        grad_B = tl.load(grad_ptr + token * grad_row + column64_B * grad_column, mask=within_B, other=0.0)
        main_B, _, is_outlier_B = nearest_point(x_B, main_scale, outlier_scale, TOP)
        ratio_B = tl.div_rn(x_B, main_scale)
        step_B = main_B - tl.where(tl.abs(ratio_B) < TOP, ratio_B, 0.0)
        total += tl.sum(tl.where(is_outlier_B, 0.0, grad_B.to(tl.float32) * step_B), 0)
    tl.store(grad_scale_ptr + token, total)


def launch_options(channels: int) -> dict[str, Any]:
    """Block and warps for tokens of `channels` values: 16 values a thread once a token fills several warps."""
    block = min(triton.next_power_of_2(channels), LARGEST_BLOCK)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 1), 8), "enable_fp_fusion": False}


class DualScaleKernel(torch.autograd.Function):
    """reference.DualScale on the GPU: same inputs, values and gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, main_scale: torch.Tensor, bits: int) -> torch.Tensor:
        channels = x.shape[-1]
        x_ND, main_scale_N = x.reshape(-1, channels), main_scale.reshape(-1).contiguous()
        values_ND = torch.empty(x_ND.shape, dtype=x.dtype, device=x.device)
        outlier_scale_N = torch.empty(len(x_ND), dtype=torch.float32, device=x.device)
        with torch.cuda.device_of(x):
            forward_kernel[(len(x_ND),)](
                x_ND, main_scale_N, values_ND, outlier_scale_N, channels, *x_ND.stride(),
                TOP=largest_code(bits), **launch_options(channels),
            )  # fmt: skip
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(x_ND, main_scale_N, outlier_scale_N)
            ctx.bits, ctx.scale_shape = bits, main_scale.shape
        return values_ND.reshape(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        if not ctx.needs_input_grad[1]:
            return grad, None, None
        x_ND, main_scale_N, outlier_scale_N = ctx.saved_tensors
        channels = x_ND.shape[-1]
        grad_ND = grad.reshape(-1, channels)
        grad_scale_N = torch.empty_like(main_scale_N)
        with torch.cuda.device_of(x_ND):
            backward_kernel[(len(x_ND),)](
                x_ND, main_scale_N, outlier_scale_N, grad_ND, grad_scale_N, channels, *x_ND.stride(), *grad_ND.stride(),
                TOP=largest_code(ctx.bits), **launch_options(channels),
            )  # fmt: skip
        return grad, grad_scale_N.reshape(ctx.scale_shape), None
