"""How sure a difference is between two models that were judged on the same prompts.

Shapes: S seeds, U prompts, R resamples.
"""

from __future__ import annotations

import numpy as np

RESAMPLES = 2000


def paired_difference(arm_SU: np.ndarray, base_SU: np.ndarray) -> dict[str, float]:
    """Mean of arm − base, its 95 % interval and the share of resamples on the other side of 0, doubled; seeds and
    prompts are both drawn anew, the same ones for either.
    """
    difference_SU = arm_SU - base_SU
    seeds, units = difference_SU.shape
    random = np.random.default_rng(0)
    seed_RS, unit_RU = random.integers(seeds, size=(RESAMPLES, seeds)), random.integers(units, size=(RESAMPLES, units))
    mean_R = np.array([difference_SU[np.ix_(s, u)].mean() for s, u in zip(seed_RS, unit_RU, strict=True)])
    low, high = np.quantile(mean_R, (0.025, 0.975))
    other_side = min((mean_R <= 0).mean(), (mean_R >= 0).mean())
    return {"mean": rounded(difference_SU.mean()), "low": rounded(low), "high": rounded(high),
            "p": rounded(min(1.0, 2 * other_side))}  # fmt: skip


def rounded(value: float) -> float:
    return round(float(value), 5)
