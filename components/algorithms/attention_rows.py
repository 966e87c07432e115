"""What chosen queries look at, without the map of all pairs.

sdpa and flash attention give no weights out, and the map of every pair of tokens in every head does not fit. Rows of it
are cheap: their scores against all keys, normalised by each row's own log-sum-exp.

Shapes: B sequences, H query heads, G KV heads, n = H / G, T queries, S keys, R chosen rows, C rows of a chunk, d
channels of a head, M kept positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_ROWS = 64
"""Rows handled at once: bounds the fp32 scores [B, H, chunk, S] whatever R is."""


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


def score_chunks(
    query_BHTd: Tensor, key_BGSd: Tensor, rows_R: Tensor, mask: Tensor | None, scaling: float
) -> Iterator[Tensor]:
    """[B, H, C, S] fp32 scores of the chosen rows, -inf where they may not look, CHUNK_ROWS rows at a time.

    Queries and keys as they enter the softmax, so after rotation and norm; the last query is the one at the last key.
    `mask` is what the attention gets: None (causal), bool (True may be looked at) or additive, [B, 1 or H, T, S].
    """
    heads, queries, groups, keys = query_BHTd.shape[1], query_BHTd.shape[2], key_BGSd.shape[1], key_BGSd.shape[2]
    query_BGnTd = query_BHTd.unflatten(1, (groups, heads // groups))
    key_BG1dS = key_BGSd.float().transpose(-1, -2)[:, :, None]
    key_S = torch.arange(keys, device=key_BGSd.device)
    for rows_C in rows_R.split(CHUNK_ROWS):
        scores_BHCS = (query_BGnTd[..., rows_C, :].float() * scaling @ key_BG1dS).flatten(1, 2)
        allowed = key_S <= rows_C[:, None] + keys - queries if mask is None else mask[:, :, rows_C, :keys]
        if allowed.dtype == torch.bool:
            yield scores_BHCS.masked_fill(~allowed, -torch.inf)
        else:
            yield scores_BHCS + allowed.float()


def largest_weights(query_BHTd: Tensor, key_BGSd: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """[B, H, T] the largest post-softmax weight of each query, fp32: exp(max − logsumexp) of its row."""
    rows_T = torch.arange(query_BHTd.shape[2], device=query_BHTd.device)
    chunks = score_chunks(query_BHTd, key_BGSd, rows_T, mask, scaling)
    return torch.cat([(scores.amax(-1) - scores.logsumexp(-1)).exp() for scores in chunks], -1)


def sparse_attention(
    query_HTd: Tensor, key_GTd: Tensor, rows_R: Tensor, top: int, *, scaling: float, mask_TT: Tensor | None = None
) -> SparseAttention:
    """The `top` positions of each row; where a row can see fewer, the places left have position -1 and weight 0.

    The mask is that of `score_chunks`, of one sequence and for all heads.
    """
    kept = []
    for weights_CT in _mean_weights(query_HTd, key_GTd, rows_R, scaling, mask_TT):
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
    return torch.cat(list(_mean_weights(query_HTd, key_GTd, rows_R, scaling, mask_TT)))


def _mean_weights(
    query_HTd: Tensor, key_GTd: Tensor, rows_R: Tensor, scaling: float, mask_TT: Tensor | None
) -> Iterator[Tensor]:
    mask = None if mask_TT is None else mask_TT[None, None]
    for scores_BHCT in score_chunks(query_HTd[None], key_GTd[None], rows_R, mask, scaling):
        yield (scores_BHCT - scores_BHCT.logsumexp(-1, keepdim=True)).exp()[0].mean(0)
