"""Do the experts agree? Krippendorff's alpha over the steps that more than one of them rated, with its interval."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import krippendorff
import numpy as np

from reflux.components.ingest_labels.validation import RATINGS, Label

RESAMPLES = 1000
COVERAGE = 0.95


@dataclass(frozen=True, kw_only=True)
class Agreement:
    steps: int
    """Rated by at least two people."""
    ratings: int
    """Of these steps."""
    annotators: int
    """Who gave them."""
    alpha: float | None = None
    """1 for agreement, 0 for what chance would give, below 0 for less; ratings count as ordered (ordinal). None where
    it is undefined: no such step, or all ratings of such steps are the same."""
    alpha_low: float | None = None
    alpha_high: float | None = None


def agreement(labels: list[Label], seed: int = 0) -> Agreement:
    """Krippendorff's alpha and the 95 % percentile interval of 1,000 resamples.

    Whole answers are drawn with replacement, with all their steps: ratings of one answer's steps are not independent,
    so drawing single steps would give an interval that is too narrow. Resamples in which alpha is undefined are left
    out, and there is no interval for fewer than two answers, or if half of the resamples are.
    """
    rated: dict[tuple[str, int], list[Label]] = defaultdict(list)
    for label in labels:
        rated[label.trace_id, label.step].append(label)
    shared = {unit: ratings for unit, ratings in rated.items() if len(ratings) > 1}
    counts_NV = np.array([_counts(ratings) for ratings in shared.values()]).reshape(-1, len(RATINGS))
    alpha = _alpha(counts_NV)
    low, high = (None, None) if alpha is None else _interval(counts_NV, [trace for trace, _ in shared], seed)
    return Agreement(
        steps=len(shared),
        ratings=int(counts_NV.sum()),
        annotators=len({label.annotator for ratings in shared.values() for label in ratings}),
        alpha=alpha,
        alpha_low=low,
        alpha_high=high,
    )


def by_dimension(labels: list[Label], dimensions: Mapping[str, str], seed: int = 0) -> list[dict[str, Any]]:
    """Rows of the table `agreement`: over all labels (dimension null), then over those of each dimension."""
    groups: dict[str, list[Label]] = defaultdict(list)
    for label in labels:
        groups[dimensions[label.trace_id]].append(label)
    whole = {"dimension": None, **vars(agreement(labels, seed))}
    return [whole, *({"dimension": name, **vars(agreement(groups[name], seed))} for name in sorted(groups))]


def _counts(ratings: list[Label]) -> list[int]:
    counted = Counter(label.rating for label in ratings)
    return [counted[rating] for rating in RATINGS]


def _alpha(counts_NV: np.ndarray) -> float | None:
    """[N, V] how many people gave step n the rating v."""
    if np.count_nonzero(counts_NV.sum(axis=0)) < 2:
        return None
    return float(krippendorff.alpha(value_counts=counts_NV, level_of_measurement="ordinal", value_domain=list(RATINGS)))


def _interval(counts_NV: np.ndarray, traces: list[str], seed: int) -> tuple[float | None, float | None]:
    names = sorted(set(traces))
    if len(names) < 2:
        return None, None
    own = [counts_NV[np.array(traces) == name] for name in names]
    random = np.random.default_rng(seed)
    drawn = (random.integers(len(own), size=len(own)) for _ in range(RESAMPLES))
    alphas = [_alpha(np.concatenate([own[index] for index in indices])) for indices in drawn]
    defined = [alpha for alpha in alphas if alpha is not None]
    if 2 * len(defined) < RESAMPLES:
        return None, None
    low, high = np.quantile(defined, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return float(low), float(high)
