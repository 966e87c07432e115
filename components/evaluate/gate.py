"""The verdict: is the distilled student good enough to be deployed?

A gate fails the run, never the stage: everything measured is written first. A threshold of 0 switches its gate off.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reflux.components.algorithms.gap_closed import GapClosed, gap_closed_with_interval

from .config import EvaluateConfig
from .row import Row


@dataclass(frozen=True, kw_only=True)
class Gate:
    name: str
    meaning: str
    value: float | None
    """None: could not be computed, which fails unless the gate is off."""
    comparison: str
    """">=" or "<=", from value to threshold."""
    threshold: float

    @property
    def result(self) -> str:
        if self.threshold == 0:
            return "off"
        if self.value is None:
            return "fail"
        passed = self.value >= self.threshold if self.comparison == ">=" else self.value <= self.threshold
        return "pass" if passed else "fail"

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "meaning": self.meaning,
            "value": self.value,
            "comparison": self.comparison,
            "threshold": self.threshold,
            "result": self.result,
        }


def gaps_closed(rows: list[Row], seed: int) -> dict[str, GapClosed]:
    """Of the gap that quantisation opened, the share that distillation closed: on held-out answers and on the text."""
    compared = [by_role(rows, role) for role in ("undistilled", "distilled", "full")]
    tokens_U = np.array([trace.tokens for trace in compared[0].traces])
    before_U, after_U, full_U = (np.array([trace.nll_nats for trace in row.traces]) for row in compared)
    heldout = gap_closed_with_interval(before_U, after_U, full_U, tokens_U, seed=seed)

    before_W, after_W, full_W = (np.array(row.text_nats) for row in compared)
    tokens_W = np.full(len(full_W), compared[0].text_tokens / len(full_W))
    return {
        "heldout": heldout,
        "text": gap_closed_with_interval(before_W, after_W, full_W, tokens_W, seed=seed),
    }


def gates(config: EvaluateConfig, rows: list[Row], gaps: dict[str, GapClosed]) -> list[Gate]:
    distilled, full = by_role(rows, "distilled"), by_role(rows, "full")
    return [
        Gate(
            name="min_gap_closed_heldout",
            meaning="gap closed on held-out answers",
            value=gaps["heldout"].value,
            comparison=">=",
            threshold=config.min_gap_closed_heldout,
        ),
        Gate(
            name="min_gap_closed_text",
            meaning="gap closed on the evaluation text",
            value=gaps["text"].value,
            comparison=">=",
            threshold=config.min_gap_closed_text,
        ),
        Gate(
            name="max_perplexity_ratio",
            meaning="perplexity, distilled over full precision",
            value=distilled.perplexity / full.perplexity,
            comparison="<=",
            threshold=config.max_perplexity_ratio,
        ),
        Gate(
            name="min_pmr",
            meaning="policy match rate, distilled",
            value=distilled.pmr,
            comparison=">=",
            threshold=config.min_pmr,
        ),
    ]


def verdict(gates: list[Gate]) -> str:
    """ "fail" if any gate fails, else "pass"."""
    return "fail" if any(gate.result == "fail" for gate in gates) else "pass"


def by_role(rows: list[Row], role: str) -> Row:
    """The row with a role that occurs once."""
    (row,) = (row for row in rows if row.role == role)
    return row
