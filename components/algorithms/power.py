"""Where a sequence spends its computation, as a distribution over its tokens (systems: compute power).

p_t = alpha a_t + beta f_t + gamma c_t: the largest attention weight, the norm of the FFN's output and the cost of the
KV cache at token t. From p_t to the distribution the order is fixed: padding out, moving average over valid tokens,
min-max, a small floor, L1. Smoothing before masking would leak padding into the last tokens, and min-max alone leaves
exact zeros that no logarithm survives.

Shapes: B sequences, T tokens, F features (attention, ffn, cost), W tokens of a window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FEATURES = ("attention", "ffn", "cost")
"""The order of the last axis of features, and of alpha, beta, gamma."""

SMOOTHED_TOKENS = 5
FLOOR = 1e-6
WINDOW_TOKENS = 32
FLAT = 1e-9
"""Of the largest |value|: a spread below it is the rounding of equal values, and stretching it would show only that."""


@dataclass(frozen=True, kw_only=True)
class Window:
    first: int
    tokens: int
    std: float
    """Of the power of its tokens, relative to the largest of the sequence, which is 1."""
    entropy_nats: float
    """Of the power within the window, normalised to sum 1; ln(tokens) where it is even."""


def power_distribution(
    features_BTF: Tensor, mask_BT: Tensor, coefficients: Tensor, group_BT: Tensor | None = None, *, scaled: bool = True
) -> Tensor:
    """[B, T] P in float64: positive at valid tokens, where it sums to 1 per sequence, 0 elsewhere.

    `coefficients` [F] for all tokens or [B, T, F] for each. `scaled` brings every feature of a sequence to [0, 1]
    before it is weighted, since a share of attention, a norm and microseconds have no common unit; False is the
    published sum, in which the feature of the largest unit decides. `group_BT` names tokens that are scaled among
    themselves. A sequence without a valid token gives zeros. What stands at invalid tokens, NaN included, does not
    matter.
    """
    mask_BT = mask_BT.bool()
    features_BTF = features_BTF.double().masked_fill(~mask_BT[..., None], 0)
    if scaled:
        features_BTF = min_max(features_BTF, mask_BT, group_BT)
    score_BT = (features_BTF * coefficients.double()).sum(-1).masked_fill(~mask_BT, 0)
    smooth_BT = moving_average(score_BT, mask_BT, SMOOTHED_TOKENS)
    level_BT = (min_max(smooth_BT[..., None], mask_BT)[..., 0] + FLOOR) * mask_BT
    return level_BT / level_BT.sum(-1, keepdim=True).clamp(min=FLOOR)


def moving_average(x_BT: Tensor, mask_BT: Tensor, width: int) -> Tensor:
    """[B, T] mean over the valid tokens among the `width` centred on each valid token; 0 at the others."""
    mask_BT = mask_BT.bool()
    sides = (width // 2, width - 1 - width // 2)
    held_BT, count_BT = (
        torch.nn.functional.pad(each_BT, sides).unfold(-1, width, 1).sum(-1)
        for each_BT in (x_BT.masked_fill(~mask_BT, 0), mask_BT.to(x_BT.dtype))
    )
    return (held_BT / count_BT.clamp(min=1)).masked_fill(~mask_BT, 0)


def min_max(x_BTF: Tensor, mask_BT: Tensor, group_BT: Tensor | None = None) -> Tensor:
    """[B, T, F] every feature of a sequence (of a group of its tokens) stretched to [0, 1] over its valid tokens; 0 at
    the others and where all are equal.
    """
    group_BT = torch.zeros_like(mask_BT, dtype=torch.long) if group_BT is None else group_BT
    stretched_BTF = torch.zeros_like(x_BTF)
    for group in group_BT.unique().tolist():
        of_BT1 = (mask_BT.bool() & (group_BT == group))[..., None]
        low_B1F = x_BTF.masked_fill(~of_BT1, torch.inf).amin(1, keepdim=True)
        high_B1F = x_BTF.masked_fill(~of_BT1, -torch.inf).amax(1, keepdim=True)
        range_B1F = high_B1F - low_B1F
        varies_B1F = range_B1F > FLAT * torch.maximum(low_B1F.abs(), high_B1F.abs())
        stretched_BTF = torch.where(of_BT1 & varies_B1F, (x_BTF - low_B1F) / range_B1F, stretched_BTF)
    return stretched_BTF


def window_statistics(power_T: Tensor, width: int = WINDOW_TOKENS) -> list[Window]:
    """One per `width` consecutive tokens of a sequence's P [T], and one of what remains."""
    if not len(power_T):
        return []
    level_T = power_T.double() / power_T.max()
    windows = []
    for first, level_W in zip(range(0, len(level_T), width), level_T.split(width), strict=True):
        share_W = level_W / level_W.sum()
        windows.append(
            Window(
                first=first,
                tokens=len(level_W),
                std=level_W.std(correction=0).item(),
                entropy_nats=torch.special.entr(share_W).sum().item(),
            )
        )
    return windows
