"""Decoded tokens as tables: by token, by stretch of positions for those never decoded, and the profiler's own cost.

Shapes: R rounds, T tokens of an answer, N positions.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .decode_cost import DecodeCost

BUCKET_TOKENS = 100


def cost_rows(costs: list[DecodeCost]) -> list[dict[str, Any]]:
    """Rows of profile_schemas.KV_COST: medians over the rounds."""
    rows = []
    for cost in costs:
        update_us, read_us, token_us = (
            us_RT.quantile(0.5, 0).tolist() for us_RT in (cost.update_us_RT, cost.read_us_RT, cost.bare_us_RT)
        )
        rows += [
            {
                "trace_id": cost.trace_id,
                "position": cost.first_position + offset,
                "kv_bytes": held,
                "update_us": update_us[offset],
                "read_us": read_us[offset],
                "token_us": token_us[offset],
            }
            for offset, held in enumerate(cost.kv_bytes)
        ]
    return rows


def bucket_rows(costs: list[DecodeCost]) -> list[dict[str, Any]]:
    """Rows of profile_schemas.KV_COST_BUCKETS: over all timings, not the medians of tokens, since the spread counts."""
    positions: dict[int, set[tuple[str, int]]] = {}
    timings: dict[int, list[Tensor]] = {}
    for cost in costs:
        us_4RT = torch.stack([cost.access_us(), cost.update_us_RT, cost.read_us_RT, cost.bare_us_RT])
        for offset in range(us_4RT.shape[-1]):
            position = cost.first_position + offset
            positions.setdefault(position // BUCKET_TOKENS, set()).add((cost.trace_id, position))
            timings.setdefault(position // BUCKET_TOKENS, []).append(us_4RT[..., offset])
    rows = []
    for bucket in sorted(timings):
        us_4N = torch.cat(timings[bucket], -1)
        mean, variance = us_4N.mean(-1).tolist(), us_4N.var(-1, correction=0).tolist()
        rows.append(
            {
                "position_from": bucket * BUCKET_TOKENS,
                "position_to": (bucket + 1) * BUCKET_TOKENS,
                "tokens": len(positions[bucket]),
                "timings": us_4N.shape[-1],
                "access_us_mean": mean[0],
                "access_us_variance": variance[0],
                "update_us_mean": mean[1],
                "read_us_mean": mean[2],
                "token_us_mean": mean[3],
                "token_us_variance": variance[3],
            }
        )
    return rows


def expected_cost_us(position_N: Tensor, buckets: list[dict[str, Any]]) -> Tensor:
    """[N] the mean cost at each position's bucket; where nothing was decoded, that of the nearest bucket."""
    middle_U = torch.tensor([(row["position_from"] + row["position_to"]) / 2 for row in buckets])
    mean_U = torch.tensor([row["access_us_mean"] for row in buckets], dtype=torch.float64)
    return mean_U[(position_N[:, None] + 0.5 - middle_U).abs().argmin(-1)]


def overhead_rows(costs: list[DecodeCost]) -> list[dict[str, Any]]:
    """Rows of profile_schemas.PROFILER_OVERHEAD, over all traces."""
    if not costs:
        return []
    bare_us_RN, profiled_us_RN = _over_traces(costs)
    return [
        {
            "round": number,
            "tokens": bare_us_RN.shape[-1],
            "bare_us_p50": bare_us_N.quantile(0.5).item(),
            "profiled_us_p50": profiled_us_N.quantile(0.5).item(),
        }
        for number, (bare_us_N, profiled_us_N) in enumerate(zip(bare_us_RN, profiled_us_RN, strict=True))
    ]


def cost_metrics(costs: list[DecodeCost]) -> dict[str, float]:
    """Medians per token, and what the profiler adds to one beside what two bare decodes of one token differ by."""
    if not costs:
        return {}
    bare_us_RN, profiled_us_RN = _over_traces(costs)
    added_us = (profiled_us_RN.quantile(0.5, 0) - bare_us_RN.quantile(0.5, 0)).quantile(0.5).item()
    of_part = {
        name: torch.cat([getattr(cost, f"{name}_us_RT").quantile(0.5, 0) for cost in costs]).quantile(0.5).item()
        for name in ("update", "read")
    }
    metrics = {
        "kv_update_us_p50": of_part["update"],
        "kv_read_us_p50": of_part["read"],
        "token_us_p50": bare_us_RN.quantile(0.5).item(),
        "profiler_overhead_us": added_us,
        "profiler_overhead_share": added_us / bare_us_RN.quantile(0.5).item(),
    }
    if len(bare_us_RN) > 1:
        repeats = torch.stack([(later - earlier).abs() for earlier, later in pairwise(bare_us_RN)])
        metrics["profiler_noise_us"] = repeats.quantile(0.5).item()
    return metrics


def _over_traces(costs: list[DecodeCost]) -> tuple[Tensor, Tensor]:
    """[R, N] bare and profiled microseconds of the tokens of all traces."""
    return (
        torch.cat([cost.bare_us_RT for cost in costs], -1),
        torch.cat([cost.profiled_us_RT for cost in costs], -1),
    )
