"""Which answers experts found hard, and what sets these apart from the others.

The composition is computed from columns alone. `hesitant` is the teacher's own measure: a mean entropy in the highest
quarter of all answers, so that it holds for a quarter of them and a larger share among the hard ones means something.
Whether an answer crosses domains stands in no column, and is not guessed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from reflux.components.ingest_labels.validation import Label

UPPER_QUARTER = 0.75


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the table `traces` says about one answer."""

    trace_id: str
    dimension: str
    tokens: int
    entropy_nats: float
    """Mean over its tokens."""
    stop_reason: str
    ends_in_loop: bool


def hard_samples(labels: list[Label], hard_rating: int) -> list[dict[str, Any]]:
    """One row per labelled trace, in the order of the first label."""
    by_trace: dict[str, list[Label]] = defaultdict(list)
    for label in labels:
        by_trace[label.trace_id].append(label)
    samples = []
    for trace_id, own in by_trace.items():
        ratings = [label.rating for label in own]
        holds = {
            "low_rating": min(ratings) <= hard_rating,
            "overload": any(label.overload for label in own),
            "guardrail": any(label.guardrail for label in own),
        }
        samples.append(
            {
                "trace_id": trace_id,
                "prompt_id": own[0].prompt_id,
                "ratings": len(ratings),
                "rating_mean": sum(ratings) / len(ratings),
                "rating_min": min(ratings),
                "hard": any(holds.values()),
                "reasons": [reason for reason, true in holds.items() if true],
            }
        )
    return samples


def composition(samples: list[dict[str, Any]], facts: Iterable[Facts]) -> list[dict[str, Any]]:
    """Rows of the table `composition`: how many traces of each set have each property."""
    every = {fact.trace_id: fact for fact in facts}
    reasons = {sample["trace_id"]: sample["reasons"] for sample in samples}
    sets = {
        "hard": [sample["trace_id"] for sample in samples if sample["hard"]],
        "labelled": [sample["trace_id"] for sample in samples],
        "all": list(every),
    }
    limits = {
        name: float(np.quantile([getattr(fact, name) for fact in every.values()], UPPER_QUARTER)) if every else 0.0
        for name in ("entropy_nats", "tokens")
    }
    rows = []
    for sample_set, trace_ids in sets.items():
        counted: Counter[str] = Counter()
        for trace_id in trace_ids:
            counted.update(_properties(every[trace_id], limits))
            counted.update(reasons[trace_id] if sample_set != "all" else ())  # of most of all, nobody has said
        rows += [
            {
                "sample_set": sample_set,
                "property": name,
                "traces": counted[name],
                "of": len(trace_ids),
                "share": counted[name] / len(trace_ids),
            }
            for name in sorted(counted)
        ]
    return rows


def _properties(fact: Facts, limits: Mapping[str, float]) -> Iterable[str]:
    yield f"dimension {fact.dimension}"
    if fact.entropy_nats > limits["entropy_nats"]:
        yield "hesitant"
    if fact.tokens > limits["tokens"]:
        yield "long"
    if fact.stop_reason != "eos":
        yield "cut off"
    if fact.ends_in_loop:
        yield "loops"
