"""Which of a token's true outliers a policy's scales put on the outlier grid: how well a threshold stands.

A main grid that ends too far out takes outliers for ordinary values and is too coarse for those; one that ends too soon
spends the coarse grid on what is ordinary. Published for a policy under training: 41 % of outliers caught before the
warm-up, 89 % after it. Shapes: B sequences, T tokens, N of them, D channels, K outliers of a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from reflux.kernels.dual_scale_quant import outlier_scale, quantize

from .layer_bits import FULL_PRECISION
from .low_bit import watching_sites

OUTLIER_SHARE = 0.01
"""Of a token's values, the largest by |x|: its true outliers, one at least."""


def captured(x_ND: Tensor, main_scale_N1: Tensor, bits: int) -> Tensor:
    """[N] share of each token's true outliers that are rounded on the outlier grid."""
    outliers = math.ceil(OUTLIER_SHARE * x_ND.shape[-1])
    outlier_NK = x_ND.gather(-1, x_ND.abs().topk(outliers, sorted=False).indices)
    _, flag_NK = quantize(outlier_NK, main_scale_N1, outlier_scale(x_ND, main_scale_N1, bits), bits)
    return flag_NK.float().mean(-1)


@contextmanager
def watching_capture(
    model: Any, site_bits: Mapping[str, int], rows_N: list[int] | Tensor, columns_N: list[int] | Tensor
) -> Iterator[list[Tensor]]:
    """Within the block, of the N tokens at these rows and columns of the model's forwards: a [N] of captured shares for
    each dual-scale site that rounds, in order. `site_bits` are those of `bits_of_sites`.
    """
    found: list[Tensor] = []

    @torch.no_grad()
    def see(site: str, x_BTD: Tensor) -> None:
        if site_bits[site] < FULL_PRECISION:
            scale_BT = model.model.main_scales[model.policy.index[site]].expand(x_BTD.shape[:2])
            found.append(captured(x_BTD[rows_N, columns_N], scale_BT[rows_N, columns_N][:, None], site_bits[site]))

    with watching_sites(model, see):
        yield found
