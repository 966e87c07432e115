"""Master weights that round to codes which somebody else has chosen: GPTQ's, AutoRound's, any on a grid of ours.

A code stands for all weights that round to it, its cell. Training is to begin with exactly those codes and yet with
weights that can leave them, so every master weight is the value of its cell that is nearest to the weight in full
precision, not the middle of the cell, from which the way out is longest.

Shapes: O outputs, I inputs, G groups of a row, S inputs of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cpu_kernels import CodedWeight
from .low_bit import LowBitLinear
from .quantizers import SMALLEST_SCALE, code_range, weight_values

MARGIN = 0.05
"""Steps that a master weight stays away from the end of its cell, so that float16's rounding of a scale moves none."""


@torch.no_grad()
def begin_at_codes(linear: LowBitLinear, coded: CodedWeight, *, near_weight: bool) -> None:
    """Give `linear` the codes, scales and zero points of `coded`, which have its bits and groups. Its master weights
    are those of their cells nearest to what they were, or, unless `near_weight`, the values that the codes stand for.

    ValueError for zero points, if the linear has none.
    """
    weight = linear.weight
    steps_OGS, scale_OG, zero_OG = _counted_up(coded)
    if zero_OG.any() and not linear.has_zero_points:
        raise ValueError("its groups have zero points, or scales below zero; take distill.weight_zero_points=true")
    lowest, highest = (end - zero_OG[..., None].to(weight.dtype) for end in code_range(coded.bits))
    before_OI = weight if near_weight else weight_values(coded.codes_OI, coded.scale_OG, coded.zero_OG)
    own_OGS = before_OI.reshape(steps_OGS.shape) / scale_OG[..., None]
    from_OGS = torch.where(steps_OGS <= lowest, -torch.inf, steps_OGS - 0.5 + MARGIN)
    to_OGS = torch.where(steps_OGS >= highest, torch.inf, steps_OGS + 0.5 - MARGIN)
    latent_OGS = own_OGS.clamp(from_OGS, to_OGS) * scale_OG[..., None]
    weight.copy_(latent_OGS.reshape(weight.shape))
    ends = latent_OGS.amax(-1).clamp(min=0) - latent_OGS.amin(-1).clamp(max=0)
    width_OG = ends if linear.has_zero_points else 2 * latent_OGS.abs().amax(-1)
    spanned_OG = scale_OG * (highest - lowest)[..., 0]
    linear.log_clip_OG.copy_(torch.where(width_OG > 0, spanned_OG / width_OG, 1.0).log())
    linear.zero_OG = zero_OG if linear.has_zero_points else None


def _counted_up(coded: CodedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """Steps from zero [O, G, S], scales [O, G] and zero points [O, G] int8, all scales above zero: AutoRound's may be
    below, where the longer side of its grid is the upper one.
    """
    scale_OG = coded.scale_OG.to(torch.float16).float()
    zero_OG = torch.zeros_like(scale_OG, dtype=torch.int8) if coded.zero_OG is None else coded.zero_OG
    steps_OGS = coded.codes_OI.reshape(*scale_OG.shape, -1).float() - zero_OG[..., None]
    is_below_OG = scale_OG < 0
    steps_OGS = torch.where(is_below_OG[..., None], -steps_OGS, steps_OGS)
    return steps_OGS, scale_OG.abs().clamp(min=SMALLEST_SCALE), torch.where(is_below_OG, -1 - zero_OG, zero_OG)
