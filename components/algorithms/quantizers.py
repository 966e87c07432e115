"""Fake quantisation of weights and activations.

Weights: symmetric, per group of consecutive input channels, rounded to nearest, scale in float16 as it is stored; where
the grid ends can be learned per group.
Activations: `plain` has one dynamic scale per token; `dual` adds a second grid for outliers
(kernels/dual_scale_quant). Gradients pass straight through. Shapes: O outputs, I inputs, G groups of a row, S inputs
of a group; N tokens, D channels.
"""

from __future__ import annotations

from typing import Any

import torch

from reflux.kernels.dual_scale_quant import dual_scale_quant, largest_code

from .layer_bits import TERNARY

SMALLEST_SCALE = 2.0**-14  # the smallest normal float16: a group of zeros keeps a usable scale


def check_group_size(group_size: int, columns: int, layer: str = "every layer") -> None:
    """ValueError if groups of that size do not fill the `columns` input channels of the layer."""
    if columns % group_size:
        raise ValueError(f"group_size {group_size}: must divide the {columns} input channels of {layer}")


def code_range(bits: int) -> tuple[int, int]:
    """Smallest and largest code of a weight."""
    return (-1, 1) if bits == TERNARY else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def weight_codes(
    weight_OI: torch.Tensor, bits: int, group_size: int, log_clip_OG: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 [O, I] in [−2^(b−1), 2^(b−1) − 1], or {−1, 0, 1} for TERNARY, and scales [O, G] (float16 values).

    The grid ends at each group's largest |w| times exp(log_clip), 1 if there is none: learnable weight clipping as in
    OmniQuant (arXiv 2308.13137). A ternary grid ends at the group's mean |w| instead, as in BitNet b1.58 (arXiv
    2402.17764). ValueError if the group does not divide I.
    """
    codes_OGS, scale_OG, _ = _on_grid(weight_OI, bits, group_size, log_clip_OG)
    return codes_OGS.to(torch.int8).reshape(weight_OI.shape), scale_OG


def _on_grid(
    weight_OI: torch.Tensor, bits: int, group_size: int, log_clip_OG: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes as floats [O, G, S], scales [O, G], and the weights in steps of the grid before rounding [O, G, S]."""
    rows, columns = weight_OI.shape
    check_group_size(group_size, columns)
    grouped_OGS = weight_OI.reshape(rows, columns // group_size, group_size)
    lowest, highest = code_range(bits)
    half_steps = highest - lowest  # where it is one code longer below zero, half the width is (2^b − 1) / 2 steps
    end_OG = grouped_OGS.abs().mean(-1) if bits == TERNARY else grouped_OGS.abs().amax(-1)
    if log_clip_OG is not None:
        end_OG = end_OG * log_clip_OG.exp()
    scale_OG = (end_OG * 2 / half_steps).to(torch.float16).to(weight_OI.dtype).clamp(min=SMALLEST_SCALE)
    steps_OGS = grouped_OGS / scale_OG[..., None]
    return steps_OGS.round().clamp_(lowest, highest), scale_OG, steps_OGS


def weight_values(codes_OI: torch.Tensor, scale_OG: torch.Tensor) -> torch.Tensor:
    """[O, I] the weights that codes and scales stand for."""
    rows, groups = scale_OG.shape
    return (codes_OI.reshape(rows, groups, -1) * scale_OG[..., None]).reshape(rows, -1)


def fake_quantize_weight(
    weight_OI: torch.Tensor, bits: int, group_size: int, log_clip_OG: torch.Tensor | None = None
) -> torch.Tensor:
    """The weight as it will be deployed. The gradient reaches the master weight unchanged, and the clipping as a
    learned step size does it: LSQ, arXiv 1902.08153, eq. 3.
    """
    return _RoundWeight.apply(weight_OI, bits, group_size, log_clip_OG)


class _RoundWeight(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight_OI: torch.Tensor, bits: int, group_size: int, log_clip_OG: torch.Tensor | None
    ) -> torch.Tensor:
        codes_OGS, scale_OG, _ = _on_grid(weight_OI, bits, group_size, log_clip_OG)
        ctx.save_for_backward(weight_OI, log_clip_OG)
        ctx.bits, ctx.group_size = bits, group_size
        return codes_OGS.mul_(scale_OG[..., None]).reshape(weight_OI.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not ctx.needs_input_grad[3]:
            return grads[0], None, None, None
        weight_OI, log_clip_OG = ctx.saved_tensors
        codes_OGS, scale_OG, steps_OGS = _on_grid(weight_OI, ctx.bits, ctx.group_size, log_clip_OG)
        lowest, highest = code_range(ctx.bits)
        inside_OGS = (steps_OGS > lowest) & (steps_OGS < highest)
        slope_OGS = torch.where(inside_OGS, codes_OGS - steps_OGS, codes_OGS)
        return grads[0], None, None, (grads[0].view_as(slope_OGS) * slope_OGS).sum(-1) * scale_OG


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
