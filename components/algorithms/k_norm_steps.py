"""Finer steps where keys are long: attention's error grows with the norm of K, and the table may spend its grid by it.

A logit is q · k, so an error in q counts |k| times, and an error in k as much as its step. Where keys of a position
are long, the main grid of the sites around attention is made finer; the values beyond it go to the outlier grid, which
is the price. Shapes: L layers, T positions, P knots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .policies import PositionTable, nearest_knot

K_SITES = ("attn_in", "o_in")
"""What enters the projections to queries, keys and values, and what leaves attention."""
FINEST = 0.25
"""No step becomes finer than a quarter of what it was."""


def finer_where_keys_are_long(
    table: PositionTable, norm_LT: Tensor, sequences_T: Tensor, power: float
) -> PositionTable:
    """The table with the main scales of K_SITES times (norm / typical norm)^−power, at least FINEST and at most 1.

    `norm_LT` is the mean norm of K at each position and `sequences_T` how many sequences reached it, 0 for none;
    typical is the layer's median over positions that were reached, each knot's norm the mean over the sequences nearest
    to it. A knot that none reached repeats the one before.
    """
    knots = len(table.knots)
    knot_T = nearest_knot(torch.arange(len(sequences_T)), table.knots)
    weight_TP = torch.nn.functional.one_hot(knot_T, knots).double() * sequences_T.double()[:, None]
    weight_P = weight_TP.sum(0)
    norm_LP = norm_LT.double() @ weight_TP / weight_P.clamp(min=1)
    for p in range(1, knots):
        if not weight_P[p]:
            norm_LP[:, p] = norm_LP[:, p - 1]
    typical_L1 = norm_LT[:, sequences_T > 0].double().median(-1, keepdim=True).values
    factor_LP = (norm_LP / typical_L1).pow(-power).clamp(FINEST, 1.0).float()
    scales_SP2 = table.scales()
    for site, at in table.index.items():
        _, layer, name = site.split(".")
        if name in K_SITES:
            scales_SP2[at, :, 0] *= factor_LP[int(layer)]
    return PositionTable(table.sites, scales_SP2, table.knots)
