"""Fake quantisation of weights and activations.

Weights: per group of consecutive input channels, rounded to nearest, scale in float16 as it is stored, symmetric or
with a zero point of as many bits as a code; where the grid ends can be learned per group.
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
    weight_OI: torch.Tensor,
    bits: int,
    group_size: int,
    log_clip_OG: torch.Tensor | None = None,
    zero_OG: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int8 [O, I] in [−2^(b−1), 2^(b−1) − 1], or {−1, 0, 1} for TERNARY, and scales [O, G] (float16 values).

    The grid ends at each group's largest |w| times exp(log_clip), 1 if there is none: learnable weight clipping as in
    OmniQuant (arXiv 2308.13137). A ternary grid ends at the group's mean |w| instead, as in BitNet b1.58 (arXiv
    2402.17764). With `zero_OG`, those of `zero_points`, it spans the group's smallest to its largest weight, both times
    exp(log_clip). ValueError if the group does not divide I.
    """
    steps_OGS, scale_OG, _ = _on_grid(weight_OI, bits, group_size, log_clip_OG, zero_OG)
    codes_OGS = steps_OGS if zero_OG is None else steps_OGS + zero_OG[..., None]
    return codes_OGS.to(torch.int8).reshape(weight_OI.shape), scale_OG


def zero_points(weight_OI: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """[O, G] int8, the code of each group that stands for zero: an integer, so that zeros stay zeros, of the range of
    its codes. It does not depend on the clipping, which moves both ends of a grid alike.
    """
    lowest, highest = code_range(bits)
    low_OG, width_OG = _span(_grouped(weight_OI, group_size))
    step_OG = (width_OG / (highest - lowest)).clamp(min=SMALLEST_SCALE)
    return (lowest - (low_OG / step_OG).round()).to(torch.int8)


def _grouped(weight_OI: torch.Tensor, group_size: int) -> torch.Tensor:
    """[O, G, S]"""
    rows, columns = weight_OI.shape
    check_group_size(group_size, columns)
    return weight_OI.reshape(rows, columns // group_size, group_size)


def _span(grouped_OGS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[O, G] smallest weight and distance to the largest one; zero is always between the two."""
    low_OG = grouped_OGS.amin(-1).clamp(max=0)
    return low_OG, grouped_OGS.amax(-1).clamp(min=0) - low_OG


def _scales(
    grouped_OGS: torch.Tensor, bits: int, log_clip_OG: torch.Tensor | None, has_zero_points: bool
) -> torch.Tensor:
    """[O, G] float16 values; infinite where float16 has none so large."""
    lowest, highest = code_range(bits)
    if has_zero_points:
        _, width_OG = _span(grouped_OGS)
    else:  # where it is one code longer below zero, half the width is (2^b − 1) / 2 steps
        width_OG = 2 * (grouped_OGS.abs().mean(-1) if bits == TERNARY else grouped_OGS.abs().amax(-1))
    if log_clip_OG is not None:
        width_OG = width_OG * log_clip_OG.exp()
    return (width_OG / (highest - lowest)).to(torch.float16).to(grouped_OGS.dtype).clamp(min=SMALLEST_SCALE)


def _on_grid(
    weight_OI: torch.Tensor,
    bits: int,
    group_size: int,
    log_clip_OG: torch.Tensor | None,
    zero_OG: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In steps from zero the weights on the grid [O, G, S], the scales [O, G], and the weights before rounding."""
    grouped_OGS = _grouped(weight_OI, group_size)
    scale_OG = _scales(grouped_OGS, bits, log_clip_OG, zero_OG is not None)
    steps_OGS = grouped_OGS / scale_OG[..., None]
    return steps_OGS.round().clamp_(*_ends(bits, zero_OG, steps_OGS)), scale_OG, steps_OGS


def _ends(bits: int, zero_OG: torch.Tensor | None, like: torch.Tensor) -> tuple[Any, Any]:
    """Where a grid ends, in steps from zero: one number for all groups, or [O, G, 1]."""
    lowest, highest = code_range(bits)
    if zero_OG is None:
        return lowest, highest
    zero_OG1 = zero_OG[..., None].to(like.dtype)
    return lowest - zero_OG1, highest - zero_OG1


def require_grid(
    weight_OI: torch.Tensor, bits: int, group_size: int, layer: str, has_zero_points: bool = False
) -> None:
    """ValueError that names the layer if its weights are not finite, or larger than a float16 scale reaches."""
    if not weight_OI.isfinite().all():
        raise ValueError(f"{layer}: has weights that are not finite, which no grid holds")
    if not _scales(_grouped(weight_OI, group_size), bits, None, has_zero_points).isfinite().all():
        lowest, highest = code_range(bits)
        largest = torch.finfo(torch.float16).max * (highest - lowest)
        raise ValueError(
            f"{layer}: has weights up to {weight_OI.abs().max():.3g}; a scale is a float16, so a grid of {bits} bits "
            f"is at most {largest:.3g} wide"
        )


def weight_values(codes_OI: torch.Tensor, scale_OG: torch.Tensor, zero_OG: torch.Tensor | None = None) -> torch.Tensor:
    """[O, I] the weights that codes, scales and zero points stand for."""
    rows, groups = scale_OG.shape
    codes_OGS = codes_OI.reshape(rows, groups, -1)
    if zero_OG is not None:
        codes_OGS = codes_OGS.to(torch.int16) - zero_OG[..., None]  # of 8 bits the difference has 9
    return (codes_OGS * scale_OG[..., None]).reshape(rows, -1)


def fake_quantize_weight(
    weight_OI: torch.Tensor,
    bits: int,
    group_size: int,
    log_clip_OG: torch.Tensor | None = None,
    zero_OG: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weight as it will be deployed. The gradient reaches the master weight unchanged, and the clipping as a
    learned step size does it: LSQ, arXiv 1902.08153, eq. 3. Zero points have none.
    """
    return _RoundWeight.apply(weight_OI, bits, group_size, log_clip_OG, zero_OG)


class _RoundWeight(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight_OI: torch.Tensor,
        bits: int,
        group_size: int,
        log_clip_OG: torch.Tensor | None,
        zero_OG: torch.Tensor | None,
    ) -> torch.Tensor:
        rounded_OGS, scale_OG, _ = _on_grid(weight_OI, bits, group_size, log_clip_OG, zero_OG)
        ctx.save_for_backward(weight_OI, log_clip_OG, zero_OG)
        ctx.bits, ctx.group_size = bits, group_size
        return rounded_OGS.mul_(scale_OG[..., None]).reshape(weight_OI.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if not ctx.needs_input_grad[3]:
            return grads[0], None, None, None, None
        weight_OI, log_clip_OG, zero_OG = ctx.saved_tensors
        rounded_OGS, scale_OG, steps_OGS = _on_grid(weight_OI, ctx.bits, ctx.group_size, log_clip_OG, zero_OG)
        lowest, highest = _ends(ctx.bits, zero_OG, steps_OGS)
        inside_OGS = (steps_OGS > lowest) & (steps_OGS < highest)
        slope_OGS = torch.where(inside_OGS, rounded_OGS - steps_OGS, rounded_OGS)
        clip_grad_OG = (grads[0].view_as(slope_OGS) * slope_OGS).sum(-1) * scale_OG
        return grads[0], None, None, clip_grad_OG, None


def plain(x: torch.Tensor, main_scale: torch.Tensor | None, bits: int) -> torch.Tensor:
    """One dynamic scale per token: the largest |x| of the token falls on the largest code.

    Computed in float32 whatever the type of x, as a deployed model does it: bfloat16 has no halves above 64, and of 8
    bits a tenth of the codes would be others.
    """
    top = largest_code(bits)
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    scale = (wide.abs().amax(-1, keepdim=True) / top).clamp(min=SMALLEST_SCALE)
    rounded = ((wide / scale).round().clamp(-top, top) * scale).to(x.dtype)
    return x + (rounded - x).detach()


def dual(x: torch.Tensor, main_scale: torch.Tensor | None, bits: int) -> torch.Tensor:
    """Main scale from the policy, outlier scale from the token itself."""
    assert main_scale is not None, "dual-scale quantisation needs the policy's main scale"
    return dual_scale_quant(x, main_scale, bits)


QUANTIZERS = {"plain": plain, "dual": dual}
