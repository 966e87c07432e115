"""The profile by layer: what of many sites and stretches of positions a person wants to know about each layer."""

from __future__ import annotations

from typing import Any

BIMODAL = 5 / 9
"""Sarle's coefficient of a uniform distribution."""
NORM_OUTPUTS = ("attn_in", "mlp_in")
"""Sites that receive what a layer's norms give out."""


def layer_rows(activations: list[dict[str, Any]], k_norms: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of profile_schemas.LAYERS: means over sites and stretches by tokens, over positions by sequences."""
    rows = []
    for layer in sorted({row["layer"] for row in activations}):
        own = [row for row in activations if row["layer"] == layer]
        norm_outputs = [row for row in own if row["site"].endswith(NORM_OUTPUTS)]
        keys = [row for row in k_norms if row["layer"] == layer]
        rows.append(
            {
                "layer": layer,
                "absmax": max(row["absmax"] for row in own),
                "outlier_share": _mean(own, "outlier_share", "tokens"),
                "kurtosis": _mean(own, "kurtosis", "tokens"),
                "bimodality": _mean(own, "bimodality", "tokens"),
                "bimodal_share": bimodal_share(norm_outputs),
                "k_norm_mean": _mean(keys, "k_norm_mean", "sequences"),
            }
        )
    return rows


def bimodal_share(rows: list[dict[str, Any]]) -> float:
    """Share of tokens that stand in a stretch whose coefficient is above BIMODAL."""
    return sum(row["tokens"] for row in rows if row["bimodality"] > BIMODAL) / sum(row["tokens"] for row in rows)


def _mean(rows: list[dict[str, Any]], name: str, weight: str) -> float:
    return sum(row[name] * row[weight] for row in rows) / sum(row[weight] for row in rows)
