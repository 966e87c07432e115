"""`bucket_logits` on a GPU: the logits of a block of tokens and words are made in registers, used and forgotten.

Forward: a program takes a block of tokens through a part of the vocabulary. It keeps a running logsumexp of the words
that are not kept; the kept ones, sorted by id, are met on the way, so their logits are written out and left out of the
sum. Backward: the logits are made again, and turned into their gradient, for VOCAB_BLOCK words at a time; two matrix
products make of it what the hidden states and the weight get. No sum depends on the order in which programs finish.

Memory beside inputs and gradients: N * (K + 1 + parts) float32 forward, N * VOCAB_BLOCK values of the hidden states'
dtype backward and an [N, D] float32 sum. Shapes: N tokens, D hidden, V vocabulary, K kept tokens, S parts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from reflux.kernels import lm_head_tiles as tiles
from reflux.kernels.lm_head import LmHead
from reflux.kernels.lm_head_tiles import logits_slope, logits_tile


@triton.jit
def buckets_kernel(
    hidden_ptr, weight_ptr, ids_ptr, kept_ptr, rest_ptr, tokens, vocab_size, width, kept, part, parts,
    hidden_row, hidden_column, weight_row, weight_column, scale, soft_cap,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """kept [N, K] logits of ids [N, K], rising in each row, and rest [N, S] logsumexp of the others in each part of
    `part` words.
    """
    token_N = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    within_N = token_N < tokens
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, vocab_size)
    place_N = tl.zeros([BLOCK_N], tl.int32)  # of the next kept token that this program will meet
    for k in range(0, kept):
        id_N = tl.load(ids_ptr + token_N * kept + k, mask=within_N, other=0)
        place_N += tl.where(id_N < begin, 1, 0)
    next_N = tl.load(ids_ptr + token_N * kept + place_N, mask=within_N & (place_N < kept), other=end)
    top_N = tl.full([BLOCK_N], float("-inf"), tl.float32)
    sum_N = tl.zeros([BLOCK_N], tl.float32)
    for start in range(begin, end, BLOCK_V):
        word_V = (start + tl.arange(0, BLOCK_V)).to(tl.int64)
        within_V = word_V < end
        logits_NV = logits_tile(
            hidden_ptr, weight_ptr, token_N, within_N, word_V, within_V, width, hidden_row, hidden_column,
            weight_row, weight_column, scale, soft_cap, CAPPED, PRECISION, BLOCK_N, BLOCK_V, BLOCK_D,
        )  # fmt: skip
        logits_NV = tl.where(within_V[None, :], logits_NV, float("-inf"))
        stop = tl.minimum(start + BLOCK_V, end)
        while tl.min(next_N, 0) < stop:
            met_N = next_N < stop
            met_NV = met_N[:, None] & (word_V[None, :] == next_N[:, None])
            tl.store(kept_ptr + token_N * kept + place_N, tl.sum(tl.where(met_NV, logits_NV, 0.0), 1), mask=met_N)
            logits_NV = tl.where(met_NV, float("-inf"), logits_NV)
            place_N += tl.where(met_N, 1, 0)
            following_N = tl.load(ids_ptr + token_N * kept + place_N, mask=met_N & (place_N < kept), other=end)
            next_N = tl.where(met_N, following_N, next_N)
        higher_N = tl.maximum(top_N, tl.max(logits_NV, 1))
        finite_N = tl.where(higher_N == float("-inf"), 0.0, higher_N)  # a block whose words are all kept
        sum_N = sum_N * tl.exp(top_N - finite_N) + tl.sum(tl.exp(logits_NV - finite_N[:, None]), 1)
        top_N = higher_N
    rest_N = tl.where(top_N == float("-inf"), 0.0, top_N) + tl.log(sum_N)  # log(0) where nothing is left
    tl.store(rest_ptr + token_N * parts + tl.program_id(1), rest_N, mask=within_N)


@triton.jit
def gradient_kernel(
    hidden_ptr, weight_ptr, rest_ptr, upstream_ptr, gradient_ptr, tokens, words, width, upstream_row, gradient_row,
    hidden_row, hidden_column, weight_row, weight_column, scale, soft_cap,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """gradient [N, words] of the bare products, as if no token were kept: upstream * exp(logit − rest) * slope."""
    token_N = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    word_V = tl.program_id(1).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    within_N, within_V = token_N < tokens, word_V < words
    rest_N = tl.load(rest_ptr + token_N, mask=within_N, other=0.0)
    rest_N = tl.where(rest_N == float("-inf"), float("inf"), rest_N)  # nothing in the tail: nothing gets a gradient
    upstream_N = tl.load(upstream_ptr + token_N * upstream_row, mask=within_N, other=0.0)
    logits_NV = logits_tile(
        hidden_ptr, weight_ptr, token_N, within_N, word_V, within_V, width, hidden_row, hidden_column,
        weight_row, weight_column, scale, soft_cap, CAPPED, PRECISION, BLOCK_N, BLOCK_V, BLOCK_D,
    )  # fmt: skip
    gradient_NV = upstream_N[:, None] * tl.exp(logits_NV - rest_N[:, None])
    gradient_NV *= logits_slope(logits_NV, scale, soft_cap, CAPPED)
    out_NV = gradient_ptr + token_N[:, None] * gradient_row + word_V[None, :]
    tl.store(out_NV, gradient_NV, mask=within_N[:, None] & within_V[None, :])


def streamed_buckets(
    hidden_ND: torch.Tensor, head: LmHead, sorted_ids_NK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [N, K] of the ids, which rise in each row, and logsumexp [N] of all others; with K = 0 of all words."""
    tokens, width = hidden_ND.shape
    options = tiles.tile_options(hidden_ND.dtype, aligned=tiles.aligned(hidden_ND, head.weight_PD))
    part = tiles.words_per_program(max(tokens, 1), head.vocab_size, options)
    parts = triton.cdiv(head.vocab_size, part)
    kept_NK = torch.empty(sorted_ids_NK.shape, dtype=torch.float32, device=hidden_ND.device)
    rest_NS = torch.empty(tokens, parts, dtype=torch.float32, device=hidden_ND.device)
    if tokens:
        with torch.cuda.device_of(hidden_ND):
            buckets_kernel[(triton.cdiv(tokens, options["BLOCK_N"]), parts)](
                hidden_ND, head.weight_PD, sorted_ids_NK, kept_NK, rest_NS, tokens, head.vocab_size, width,
                sorted_ids_NK.shape[1], part, parts, *hidden_ND.stride(), *head.weight_PD.stride(),
                **tiles.transform(head), **options,
            )  # fmt: skip
    return kept_NK, rest_NS.logsumexp(-1)


class BucketLogits(torch.autograd.Function):
    """`bucketed` of the head's logits on the GPU: same values and gradients. The weight is an argument beside the head
    that holds it, so that it can get a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: torch.Tensor, weight_PD: torch.Tensor, head: LmHead, token_ids_NK: torch.Tensor
    ) -> torch.Tensor:
        sorted_ids_NK, order_NK = token_ids_NK.int().sort(-1)
        sorted_NK, rest_N = streamed_buckets(hidden_ND, head, sorted_ids_NK.contiguous())
        kept_NK = torch.empty_like(sorted_NK).scatter_(-1, order_NK, sorted_NK)
        ctx.save_for_backward(hidden_ND, weight_PD, token_ids_NK, kept_NK, rest_N)
        ctx.head = head
        return torch.cat([kept_NK, rest_N[:, None]], dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (upstream_NB,) = grads
        hidden_ND, weight_PD, token_ids_NK, kept_NK, rest_N = ctx.saved_tensors
        head, (tokens, width) = ctx.head, hidden_ND.shape
        options = tiles.tile_options(hidden_ND.dtype, aligned=tiles.aligned(hidden_ND, weight_PD))
        of_kept_NK = (upstream_NB[:, :-1] * tiles.slope(kept_NK, head)).to(hidden_ND.dtype)
        grad_hidden_ND = torch.zeros(tokens, width, dtype=torch.float32, device=hidden_ND.device)
        grad_weight_PD = torch.zeros_like(weight_PD) if ctx.needs_input_grad[1] else None
        block = min(tiles.VOCAB_BLOCK, head.vocab_size)
        # what is kept outside of a block goes to its last column, which nobody reads; 16 keep rows aligned
        gradient_NC = torch.empty(tokens, block + 16, dtype=hidden_ND.dtype, device=hidden_ND.device)
        for start in range(0, head.vocab_size if tokens else 0, block):
            words = slice(start, min(start + block, head.vocab_size))
            weight_CD, count = weight_PD[words], words.stop - start
            with torch.cuda.device_of(hidden_ND):
                gradient_kernel[(triton.cdiv(tokens, options["BLOCK_N"]), triton.cdiv(count, options["BLOCK_V"]))](
                    hidden_ND, weight_CD, rest_N, upstream_NB[:, -1], gradient_NC, tokens, count, width,
                    upstream_NB.stride(0), gradient_NC.stride(0), *hidden_ND.stride(), *weight_CD.stride(),
                    **tiles.transform(head), **options,
                )  # fmt: skip
            here_NK = (token_ids_NK >= start) & (token_ids_NK < words.stop)
            gradient_NC.scatter_(1, torch.where(here_NK, token_ids_NK - start, block).long(), of_kept_NK)
            grad_words_CD = grad_weight_PD[words] if grad_weight_PD is not None else None
            tiles.accumulate(gradient_NC[:, :count], hidden_ND, weight_CD, grad_hidden_ND, grad_words_CD)
        return grad_hidden_ND.to(hidden_ND.dtype), grad_weight_PD, None, None
