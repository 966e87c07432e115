"""Compute power of the profiled traces: from features and costs to the tables.

The features come from a forward and are part of the result; everything that the measured cost goes into, the chosen
coefficients and P included, is kept apart with the other measured values.

Shapes: B sequences, N tokens of prompt and answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from reflux.components.algorithms.power import WINDOW_TOKENS, window_statistics

from .cost_tables import expected_cost_us
from .decode_cost import DecodeCost
from .power_choice import Candidate, PowerData, chosen_of


def feature_rows(rows: list[dict[str, Any]], features: list[Tensor]) -> list[dict[str, Any]]:
    """Rows of profile_schemas.POWER_FEATURES from each trace's [N, 2]."""
    return [
        {"trace_id": row["trace_id"], "attention": feature_N2[:, 0].tolist(), "ffn_norm": feature_N2[:, 1].tolist()}
        for row, feature_N2 in zip(rows, features, strict=True)
    ]


def power_data(
    rows: list[dict[str, Any]],
    features: list[Tensor],
    classes: list[list[int]],
    costs: list[DecodeCost],
    buckets: list[dict[str, Any]],
    first_token: int,
) -> PowerData:
    """What coefficients are chosen on: all profiled traces, padded to the longest."""
    decoded = {cost.trace_id: cost for cost in costs}
    complete, latencies, importances = [], [], []
    for row, feature_N2 in zip(rows, features, strict=True):
        tokens, prompt = len(feature_N2), len(row["prompt_token_ids"])
        cost_us_N = expected_cost_us(torch.arange(tokens), buckets)
        latency_us_N = torch.full((tokens,), torch.nan, dtype=torch.float64)
        if cost := decoded.get(row["trace_id"]):
            answer = slice(cost.first_position, cost.first_position + len(cost.kv_bytes))
            cost_us_N[answer] = cost.access_us().quantile(0.5, 0)
            latency_us_N[answer] = cost.bare_us_RT.quantile(0.5, 0)
        importance_N = torch.full((tokens,), torch.nan, dtype=torch.float64)
        importance_N[prompt:] = torch.tensor(row["entropy_nats"][: max(0, tokens - prompt)], dtype=torch.float64)
        for known_N in (latency_us_N, importance_N):
            known_N[:first_token] = torch.nan
        complete.append(torch.cat([feature_N2.double(), cost_us_N[:, None]], -1))
        latencies.append(latency_us_N)
        importances.append(importance_N)
    features_BNF = pad_sequence(complete, batch_first=True)
    length_B1 = torch.tensor([[len(feature_N2)] for feature_N2 in features])
    position_N = torch.arange(features_BNF.shape[1])
    return PowerData(
        features_BNF=features_BNF,
        mask_BN=(position_N >= first_token) & (position_N < length_B1),
        class_BN=pad_sequence([torch.tensor(of_trace) for of_trace in classes], batch_first=True),
        latency_us_BN=pad_sequence(latencies, batch_first=True, padding_value=torch.nan),
        importance_BN=pad_sequence(importances, batch_first=True, padding_value=torch.nan),
    )


def coefficient_rows(candidates: list[Candidate]) -> list[dict[str, Any]]:
    """Rows of profile_schemas.POWER_COEFFICIENTS."""
    return [
        {
            **dict(zip(("alpha", "beta", "gamma"), candidate.coefficients, strict=True)),
            "latency_correlation": candidate.latency_correlation,
            "importance_correlation": candidate.importance_correlation,
            "on_front": candidate.on_front,
            "chosen": candidate.chosen,
        }
        for candidate in candidates
    ]


def power_rows(data: PowerData, power_BN: Tensor, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of profile_schemas.POWER."""
    length_B = [len(row["prompt_token_ids"]) + len(row["response_token_ids"]) for row in rows]
    return [
        {
            "trace_id": row["trace_id"],
            "cost_us": cost_us_N[:tokens].tolist(),
            "cost_measured": (~latency_us_N[:tokens].isnan()).tolist(),
            "power": power_N[:tokens].tolist(),
        }
        for row, tokens, cost_us_N, latency_us_N, power_N in zip(
            rows, length_B, data.features_BNF[..., 2], data.latency_us_BN, power_BN, strict=True
        )
    ]


def window_rows(data: PowerData, power_BN: Tensor, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of profile_schemas.POWER_WINDOWS."""
    return [
        {
            "trace_id": row["trace_id"],
            "position_from": int(mask_N.nonzero()[0]) + window.first,
            "tokens": window.tokens,
            "std": window.std,
            "entropy_nats": window.entropy_nats,
        }
        for row, mask_N, power_N in zip(rows, data.mask_BN, power_BN, strict=True)
        for window in window_statistics(power_N[mask_N])
    ]


def power_metrics(
    candidates: list[Candidate], data: PowerData, power_BN: Tensor, windows: Sequence[dict[str, Any]]
) -> dict[str, float]:
    """The chosen coefficients, and how uneven P is: between tokens, between sequences, and within full windows."""
    chosen = chosen_of(candidates)
    levels = [
        power_N[mask_N] / power_N.max() for power_N, mask_N in zip(power_BN, data.mask_BN, strict=True) if mask_N.any()
    ]
    metrics = {
        "power_alpha": chosen.coefficients[0],
        "power_beta": chosen.coefficients[1],
        "power_gamma": chosen.coefficients[2],
        "power_latency_correlation": chosen.latency_correlation,
        "power_importance_correlation": chosen.importance_correlation,
    }
    if levels:
        metrics["power_std_token"] = torch.cat(levels).std(correction=0).item()
        metrics["power_std_sequence"] = torch.stack([level_N.mean() for level_N in levels]).std(correction=0).item()
    full = [window["entropy_nats"] for window in windows if window["tokens"] == WINDOW_TOKENS]
    return metrics | ({"power_window_entropy_nats": sum(full) / len(full)} if full else {})
