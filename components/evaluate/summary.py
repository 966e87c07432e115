"""metrics.json: everything that was found, for machines. `reflux report --json` prints its table with the latencies,
the page is made of it.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from reflux.components.algorithms.gap_closed import GapClosed

from .config import EvaluateConfig
from .gate import Gate, by_role, verdict
from .row import Row
from .text import EvaluationText

FORMAT = "reflux.evaluate/1"
"""Changes when a field is renamed or changes its meaning; new fields may come without."""


MEASURED = ("latency_p50_ms", "latency_p95_ms")
"""Columns of the table that are times; they stand in the table `latencies`."""


def summarize(
    config: EvaluateConfig,
    rows: list[Row],
    gaps: dict[str, GapClosed],
    gates: list[Gate],
    text: EvaluationText,
    parents: dict[str, str],
    sources: dict[str, str],
    prompts: list[dict[str, Any]],
) -> dict[str, Any]:
    """JSON-ready. `parents` and `sources` are digests by name, `prompts` the rows of the traces' table composition.
    Numbers that could not be computed are null.
    """
    full = by_role(rows, "full")
    windows, window_tokens = text.window_WT.shape
    return {
        "format": FORMAT,
        "verdict": verdict(gates),
        "gates": [gate.as_json() for gate in gates],
        "gap_closed": {name: asdict(gap) for name, gap in gaps.items()},
        "table": [row.as_json() for row in rows],
        "text": {
            "name": text.name,
            "sha256": text.sha256,
            "windows": windows,
            "window_tokens": window_tokens,
            "scored_tokens": text.scored_tokens,
        },
        "heldout": {"traces": len(full.traces), "tokens": full.heldout_tokens},
        "prompts": prompts,
        "parents": parents,
        "sources": sources,
        "config": asdict(config),
    }


def without_times(summary: dict[str, Any]) -> dict[str, Any]:
    """What a repetition gives again, and what the artifact's digest therefore covers: all but the latencies."""
    table = [{name: row[name] for name in row if name not in MEASURED} for row in summary["table"]]
    return {**summary, "table": table}


def tracked_metrics(summary: dict[str, Any]) -> dict[str, float]:
    """The numbers worth comparing across runs: `perplexity.w4a4_dual`, `gap_closed.heldout`, `gate.min_pmr`."""
    metrics: dict[str, float] = {"verdict.pass": float(summary["verdict"] == "pass")}
    columns = ("perplexity", "nll_heldout", "pmr", "latency_p50_ms", "latency_p95_ms", "memory_bytes", "effective_bits")
    for row in summary["table"]:
        metrics |= {f"{column}.{row['scheme']}": float(row[column]) for column in columns}
    for name, gap in summary["gap_closed"].items():
        metrics |= {f"gap_closed.{name}": gap["value"]} if gap["value"] is not None else {}
    for gate in summary["gates"]:
        metrics |= {f"gate.{gate['name']}": float(gate["result"] == "pass")} if gate["result"] != "off" else {}
    return metrics
