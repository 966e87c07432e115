"""Watch every site of a model while it reads traces, and make the position table's first version of what was seen.

Shapes: B sequences, T tokens, N valid tokens of a bucket, D channels, S sites, P knots.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch

from reflux.components.algorithms.activation_statistics import (
    SiteStatistics,
    best_main_scale,
    kurtosis,
    sarle_bimodality,
)
from reflux.components.algorithms.policies import KNOTS, PositionTable, nearest_knot
from reflux.kernels.dual_scale_quant import largest_code


class ActivationWatch:
    """Statistics by (site, knot) of all valid tokens that pass; a random sample of each bucket's tokens is kept."""

    def __init__(self, sample_tokens: int, sequences: int, seed: int, knots: tuple[int, ...] = KNOTS) -> None:
        self.knots = knots
        self.quota = max(1, sample_tokens // sequences)  # per sequence, so that no trace fills a bucket alone
        self.generator = torch.Generator().manual_seed(seed)
        self.statistics: dict[tuple[str, int], SiteStatistics] = defaultdict(SiteStatistics)
        self.buckets: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def begin(self, mask_BT: torch.Tensor) -> None:
        """Sort the coming batch's valid tokens into buckets of the nearest knot, once for all sites."""
        knot_T = nearest_knot(torch.arange(mask_BT.shape[1]), self.knots)
        self.buckets = []
        for knot in knot_T.unique().tolist():
            where_BT = mask_BT.bool() & (knot_T == knot)
            count = int(where_BT.sum())
            if count:
                kept = min(count, self.quota * len(mask_BT))
                self.buckets.append((knot, where_BT, torch.randperm(count, generator=self.generator)[:kept]))

    def see(self, site: str, x_BTD: torch.Tensor) -> None:
        for knot, where_BT, sample_N in self.buckets:
            self.statistics[site, knot].update(x_BTD[where_BT].float(), sample_N)


def position_table(watch: ActivationWatch, sites: list[str], bits: int) -> PositionTable:
    """Main scales of least squared error and mean outlier scales; a knot that was never reached takes its
    neighbour's.
    """
    scales_SP2 = torch.zeros(len(sites), len(watch.knots), 2)
    for s, site in enumerate(sites):
        for p in range(len(watch.knots)):
            if (site, p) in watch.statistics:
                seen = watch.statistics[site, p]
                outlier = max(seen.token_absmax_mean / largest_code(bits), 1e-4)
                scales_SP2[s, p] = torch.tensor([best_main_scale(seen.sample(), bits), outlier])
            else:
                scales_SP2[s, p] = scales_SP2[s, p - 1]
    return PositionTable(sites, scales_SP2, watch.knots)


def activation_rows(watch: ActivationWatch, policy: PositionTable, bits: int) -> list[dict[str, Any]]:
    """Rows of profile_schemas.ACTIVATIONS, in order of site and position."""
    scales_SP2 = policy.scales()
    edges = [0, *((a + b) // 2 + 1 for a, b in pairwise(watch.knots)), None]
    rows = []
    for (site, p), seen in sorted(watch.statistics.items(), key=lambda item: (policy.index[item[0][0]], item[0][1])):
        sample_ND = seen.sample()
        main_absmax = largest_code(bits) * scales_SP2[policy.index[site], p, 0].item()
        rows.append(
            {
                "site": site,
                "layer": int(site.split(".")[1]),
                "position_from": edges[p],
                "position_to": edges[p + 1] if edges[p + 1] is not None else 2**31 - 1,
                "tokens": seen.tokens,
                "absmax": seen.absmax,
                "rms": seen.rms,
                "main_absmax": main_absmax,
                "outlier_share": (sample_ND.abs() > main_absmax).float().mean().item(),
                "kurtosis": kurtosis(sample_ND),
                "bimodality": sarle_bimodality(sample_ND.abs().clamp(min=1e-6).log()),
            }
        )
    return rows
