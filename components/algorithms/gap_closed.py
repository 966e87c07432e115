"""How much of what quantisation cost the training won back, with an interval that says how sure that is.

gap closed = (nll_before - nll_after) / (nll_before - nll_full), in nats per token: 0 is no gain, 1 is full precision.
All three models score the same units (traces or text windows), so the bootstrap resamples units, not models: it is
paired, and what makes a unit hard cancels.

Shapes: U units, R resamples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class GapClosed:
    """None where there is no gap to close: quantisation alone cost nothing."""

    value: float | None
    low: float | None
    high: float | None


def gap_closed(before: float, after: float, full: float) -> float | None:
    """Share of the gap between `before` and `full` that `after` closes, all in nats per token."""
    return (before - after) / (before - full) if before > full else None


def gap_closed_with_interval(
    before_U: np.ndarray,
    after_U: np.ndarray,
    full_U: np.ndarray,
    tokens_U: np.ndarray,
    *,
    seed: int,
    resamples: int = 2000,
    confidence: float = 0.95,
) -> GapClosed:
    """From each unit's summed nats and its tokens: the gap closed per token and its percentile bootstrap interval.

    The interval is None when a resample has no gap, which says that the units are too few or the gap is noise.
    """
    nats_3U = np.stack([before_U, after_U, full_U]).astype(np.float64)
    value = gap_closed(*(nats_3U.sum(1) / tokens_U.sum()))
    units = len(tokens_U)
    chosen_RU = np.random.default_rng(seed).integers(units, size=(resamples, units))
    nats_3R = nats_3U[:, chosen_RU].sum(-1)
    gap_R = nats_3R[0] - nats_3R[2]
    if value is None or (gap_R <= 0).any():
        return GapClosed(value=value, low=None, high=None)
    closed_R = (nats_3R[0] - nats_3R[1]) / gap_R  # the resample's number of tokens cancels
    low, high = np.quantile(closed_R, [(1 - confidence) / 2, (1 + confidence) / 2])
    return GapClosed(value=value, low=float(low), high=float(high))
