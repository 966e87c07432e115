"""What chosen tokens look at, without the map of all pairs.

sdpa and flash attention give no weights out, and the map of every pair of tokens in every head does not fit. The rows
of a few tokens are cheap: their scores against all keys, normalised by each row's own log-sum-exp.

Shapes: H query heads, G KV heads, T tokens, R chosen rows, C rows of a chunk, d channels of a head, M kept positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_ROWS = 32
"""Rows handled at once: bounds the fp32 scores [H, chunk, T] whatever R is."""


@dataclass(frozen=True, kw_only=True)
class SparseAttention:
    """The largest head-mean weights of each row, falling."""

    positions_RM: Tensor
    """int32, index of the token that is looked at, from 0."""
    weights_RM: Tensor
    coverage_R: Tensor
    """Sum of the kept weights: what share of the row's attention is in them."""
    entropy_nats_R: Tensor
    """Of the whole head-mean row, not of the kept part."""


def sparse_attention(
    query_HTd: Tensor, key_GTd: Tensor, rows_R: Tensor, top: int, *, scaling: float, mask_TT: Tensor | None = None
) -> SparseAttention:
    """The `top` positions of each row; where a row can see fewer, the places left have position -1 and weight 0.

    Queries and keys as they enter the softmax, so after rotation and norm. `mask_TT` is True (or 0) where a row may
    look and False (or -inf) where not; None is causal.
    """
    kept = []
    for weights_CT in _row_chunks(query_HTd, key_GTd, rows_R, scaling, mask_TT):
        weights_CM, positions_CM = weights_CT.topk(min(top, weights_CT.shape[-1]))
        seen_CM = weights_CM > 0
        room = (0, top - weights_CM.shape[-1])
        kept.append(
            (
                torch.nn.functional.pad(positions_CM.masked_fill(~seen_CM, -1), room, value=-1).int(),
                torch.nn.functional.pad(weights_CM, room),
                weights_CM.sum(-1),
                torch.special.entr(weights_CT).sum(-1),
            )
        )
    positions, weights, coverage, entropy = (torch.cat(parts) for parts in zip(*kept, strict=True))
    return SparseAttention(positions_RM=positions, weights_RM=weights, coverage_R=coverage, entropy_nats_R=entropy)


def attention_rows(
    query_HTd: Tensor, key_GTd: Tensor, rows_R: Tensor, *, scaling: float, mask_TT: Tensor | None = None
) -> Tensor:
    """[R, T] head-mean weights of the chosen rows in full, in fp32."""
    return torch.cat(list(_row_chunks(query_HTd, key_GTd, rows_R, scaling, mask_TT)))


def _row_chunks(
    query_HTd: Tensor, key_GTd: Tensor, rows_R: Tensor, scaling: float, mask_TT: Tensor | None
) -> Iterator[Tensor]:
    group = len(query_HTd) // len(key_GTd)
    key_HdT = key_GTd.float().repeat_interleave(group, 0).transpose(1, 2)
    position_T = torch.arange(key_GTd.shape[1], device=key_GTd.device)
    for rows_C in rows_R.split(CHUNK_ROWS):
        scores_HCT = query_HTd[:, rows_C].float() @ key_HdT * scaling
        if mask_TT is None:
            scores_HCT = scores_HCT.masked_fill(position_T > rows_C[:, None], -torch.inf)
        elif mask_TT.dtype == torch.bool:
            scores_HCT = scores_HCT.masked_fill(~mask_TT[rows_C], -torch.inf)
        else:
            scores_HCT = scores_HCT + mask_TT[rows_C].float()
        yield (scores_HCT - scores_HCT.logsumexp(-1, keepdim=True)).exp().mean(0)
