"""Do the experts agree? Krippendorff's alpha over the steps that more than one of them rated."""

from __future__ import annotations

import math
from collections import defaultdict

import krippendorff
import numpy as np

from reflux.components.ingest_labels.validation import RATINGS, Label


def krippendorff_alpha(labels: list[Label]) -> float | None:
    """1 for agreement, 0 for what chance would give, below 0 for less; ratings count as ordered (ordinal).

    None where it is undefined: no step has two ratings, or all ratings of such steps are the same.
    """
    rated: dict[tuple[str, int], dict[str, int]] = defaultdict(dict)
    for label in labels:
        rated[label.trace_id, label.step][label.annotator] = label.rating
    shared = [ratings for ratings in rated.values() if len(ratings) > 1]
    if len({rating for ratings in shared for rating in ratings.values()}) < 2:
        return None
    annotators = sorted({annotator for ratings in shared for annotator in ratings})
    table = np.array([[float(ratings.get(annotator, math.nan)) for ratings in shared] for annotator in annotators])
    return float(krippendorff.alpha(table, level_of_measurement="ordinal", value_domain=list(RATINGS)))
