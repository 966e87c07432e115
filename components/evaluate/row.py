"""One row of the result: a scheme and what was measured on it, as Parquet columns and as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from reflux.components.algorithms.divergences import policy_match_rate
from reflux.components.schemas import SCORES

from .measure import TraceScore
from .position_errors import PositionError

ROLES = ("teacher", "full", "weights_only", "plain", "rotated", "undistilled", "distilled", "given", "deployed")
"""What a scheme is in the comparison, whatever its bits are: the gate asks for roles, people read names."""


@dataclass(frozen=True, kw_only=True)
class Row:
    scheme: str
    role: str
    text_nats: list[float]
    """[W] summed over each window."""
    text_tokens: int
    traces: list[TraceScore]
    layer_errors: list[float]
    """[L], empty for a teacher of another architecture."""
    generations: list[str]
    decode_ms: list[float]
    latency_of: str
    memory_bytes: int
    kv_cache_bytes: int
    effective_bits: float
    effective_bits_activation: float
    quantizer_digest: str
    outlier_capture: float | None = None
    """Mean over sites and decisions of the first batch; None without two grids."""
    position_errors: list[PositionError] = field(default_factory=list)
    """Empty for a teacher of another width, and for a rotated model, whose head reads another basis."""

    @property
    def nll_text(self) -> float:
        """Nats per token."""
        return sum(self.text_nats) / self.text_tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll_text)

    @property
    def heldout_tokens(self) -> int:
        return sum(trace.tokens for trace in self.traces)

    @property
    def nll_heldout(self) -> float:
        """Nats per token."""
        return sum(trace.nll_nats for trace in self.traces) / self.heldout_tokens

    @property
    def pmr(self) -> float:
        return policy_match_rate(sum(trace.jsd_bits for trace in self.traces), self.heldout_tokens)

    def scores(self) -> dict[str, Any]:
        """The row of SCORES: equal on every machine of one platform."""
        return {name: getattr(self, name) for name in SCORES.names}

    def latencies(self) -> dict[str, Any]:
        """The row of LATENCIES: another one each time."""
        p50, p95 = np.percentile(self.decode_ms, [50, 95])
        return {
            "scheme": self.scheme,
            "latency_p50_ms": float(p50),
            "latency_p95_ms": float(p95),
            "latency_of": self.latency_of,
        }

    def trace_scores(self) -> list[dict[str, Any]]:
        return [{**asdict(trace), "scheme": self.scheme} for trace in self.traces]

    def as_json(self) -> dict[str, Any]:
        return {"scheme": self.scheme, "role": self.role, **self.scores(), **self.latencies()}
