"""`dense_divergence` on a GPU: blocks of both models' logits are made in registers, compared and forgotten.

Forward: two logsumexps, then the value. Backward: the logits are made a third time, and turned into the student's
gradient, for VOCAB_BLOCK words at a time. No sum depends on the order in which programs finish. Memory beside inputs
and gradients: a few float32 per token and part forward, N * VOCAB_BLOCK values of the hidden states' dtype backward and
an [N, D] float32 sum. Shapes: N tokens, D hidden, V vocabulary, S parts of it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from reflux.kernels import lm_head_tiles as tiles
from reflux.kernels.divergences import Mixture
from reflux.kernels.lm_head import LmHead
from reflux.kernels.lm_head_tiles import logits_slope, logits_tile
from reflux.kernels.topk_kl.kernel import streamed_buckets


@triton.jit
def mixed(student_NV, teacher_NV, log_share, log_rest):
    """log of share * T + (1 − share) * S; a share of 0 or 1 leaves the other alone, since its logarithm is −inf."""
    teacher_NV += log_share
    student_NV += log_rest
    gap_NV = tl.abs(teacher_NV - student_NV)
    return tl.maximum(teacher_NV, student_NV) + tl.log(1.0 + tl.exp(-gap_NV))


@triton.jit
def sloped(student_NV, teacher_NV, mixture_NV, log_rest, of_teacher, of_student):
    """exp(s) * φ of the package's docstring, in a form in which nothing overflows."""
    gap_NV = student_NV - mixture_NV  # at most −log_rest
    cover_NV = tl.exp(teacher_NV + (gap_NV + log_rest))
    own_NV = gap_NV - tl.exp(gap_NV + log_rest)
    chance_NV = tl.exp(student_NV)
    return of_student * tl.where(chance_NV == 0.0, 0.0, chance_NV * own_NV) - of_teacher * cover_NV


@triton.jit
def value_kernel(
    hidden_ptr, weight_ptr, teacher_ptr, teacher_weight_ptr, lse_ptr, teacher_lse_ptr, value_ptr, mean_ptr,
    tokens, vocab_size, width, teacher_width, part, parts, hidden_row, hidden_column, weight_row, weight_column,
    teacher_row, teacher_column, teacher_weight_row, teacher_weight_column, scale, soft_cap, teacher_scale,
    teacher_soft_cap, log_share, log_rest, of_teacher, of_student,
    CAPPED: tl.constexpr, TEACHER_CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """value and mean [N, S]: what each part of `part` words adds to the divergence and to r."""
    token_N = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    within_N = token_N < tokens
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, vocab_size)
    lse_N = tl.load(lse_ptr + token_N, mask=within_N, other=0.0)
    teacher_lse_N = tl.load(teacher_lse_ptr + token_N, mask=within_N, other=0.0)
    value_N = tl.zeros([BLOCK_N], tl.float32)
    mean_N = tl.zeros([BLOCK_N], tl.float32)
    for start in range(begin, end, BLOCK_V):
        word_V = (start + tl.arange(0, BLOCK_V)).to(tl.int64)
        within_V = word_V < end
        student_NV = logits_tile(
            hidden_ptr, weight_ptr, token_N, within_N, word_V, within_V, width, hidden_row, hidden_column,
            weight_row, weight_column, scale, soft_cap, CAPPED, PRECISION, BLOCK_N, BLOCK_V, BLOCK_D,
        ) - lse_N[:, None]  # fmt: skip
        teacher_NV = logits_tile(
            teacher_ptr, teacher_weight_ptr, token_N, within_N, word_V, within_V, teacher_width, teacher_row,
            teacher_column, teacher_weight_row, teacher_weight_column, teacher_scale, teacher_soft_cap,
            TEACHER_CAPPED, PRECISION, BLOCK_N, BLOCK_V, BLOCK_D,
        ) - teacher_lse_N[:, None]  # fmt: skip
        mixture_NV = mixed(student_NV, teacher_NV, log_share, log_rest)
        slope_NV = sloped(student_NV, teacher_NV, mixture_NV, log_rest, of_teacher, of_student)
        chance_NV, teacher_chance_NV = tl.exp(student_NV), tl.exp(teacher_NV)
        # a chance that underflows adds nothing, whatever its logarithm is multiplied with
        kl_NV = tl.where(teacher_chance_NV == 0.0, 0.0, of_teacher * teacher_chance_NV * (teacher_NV - mixture_NV))
        kl_NV += tl.where(chance_NV == 0.0, 0.0, of_student * chance_NV * (student_NV - mixture_NV))
        value_N += tl.sum(tl.where(within_V[None, :], kl_NV, 0.0), 1)
        mean_N += tl.sum(tl.where(within_V[None, :], slope_NV, 0.0), 1)
    tl.store(value_ptr + token_N * parts + tl.program_id(1), value_N, mask=within_N)
    tl.store(mean_ptr + token_N * parts + tl.program_id(1), mean_N, mask=within_N)


@triton.jit
def gradient_kernel(
    hidden_ptr, weight_ptr, teacher_ptr, teacher_weight_ptr, lse_ptr, teacher_lse_ptr, mean_ptr, upstream_ptr,
    gradient_ptr, tokens, words, width, teacher_width, upstream_row, gradient_row, hidden_row, hidden_column,
    weight_row, weight_column, teacher_row, teacher_column, teacher_weight_row, teacher_weight_column, scale,
    soft_cap, teacher_scale, teacher_soft_cap, log_share, log_rest, of_teacher, of_student,
    CAPPED: tl.constexpr, TEACHER_CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """gradient [N, words] of the bare products: upstream * exp(s) * (φ − r) * slope."""
    token_N = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    word_V = tl.program_id(1).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)
    within_N, within_V = token_N < tokens, word_V < words
    lse_N = tl.load(lse_ptr + token_N, mask=within_N, other=0.0)
    teacher_lse_N = tl.load(teacher_lse_ptr + token_N, mask=within_N, other=0.0)
    mean_N = tl.load(mean_ptr + token_N, mask=within_N, other=0.0)
    upstream_N = tl.load(upstream_ptr + token_N * upstream_row, mask=within_N, other=0.0)
    logits_NV = logits_tile(
        hidden_ptr, weight_ptr, token_N, within_N, word_V, within_V, width, hidden_row, hidden_column,
        weight_row, weight_column, scale, soft_cap, CAPPED, PRECISION, BLOCK_N, BLOCK_V, BLOCK_D,
    )  # fmt: skip
    teacher_NV = logits_tile(
        teacher_ptr, teacher_weight_ptr, token_N, within_N, word_V, within_V, teacher_width, teacher_row,
        teacher_column, teacher_weight_row, teacher_weight_column, teacher_scale, teacher_soft_cap,
        TEACHER_CAPPED, PRECISION, BLOCK_N, BLOCK_V, BLOCK_D,
    ) - teacher_lse_N[:, None]  # fmt: skip
    student_NV = logits_NV - lse_N[:, None]
    mixture_NV = mixed(student_NV, teacher_NV, log_share, log_rest)
    slope_NV = sloped(student_NV, teacher_NV, mixture_NV, log_rest, of_teacher, of_student)
    gradient_NV = upstream_N[:, None] * (slope_NV - tl.exp(student_NV) * mean_N[:, None])
    gradient_NV *= logits_slope(logits_NV, scale, soft_cap, CAPPED)
    out_NV = gradient_ptr + token_N[:, None] * gradient_row + word_V[None, :]
    tl.store(out_NV, gradient_NV, mask=within_N[:, None] & within_V[None, :])


def weights(mixture: Mixture) -> dict[str, float]:
    """What a kernel is told of the divergence."""
    return {
        "log_share": math.log(mixture.share) if mixture.share > 0 else -math.inf,
        "log_rest": math.log1p(-mixture.share) if mixture.share < 1 else -math.inf,
        "of_teacher": float(mixture.of_teacher),
        "of_student": float(mixture.of_student),
    }


def _both(head: LmHead, teacher_head: LmHead) -> dict[str, Any]:
    of_teacher = {
        f"teacher_{name}" if name.islower() else f"TEACHER_{name}": value
        for name, value in tiles.transform(teacher_head).items()
    }
    return tiles.transform(head) | of_teacher


def pair_options(dtype: torch.dtype, *, aligned: bool, hip: bool | None = None) -> dict[str, Any]:
    """As `tiles.tile_options`; two blocks of logits at once need two blocks' registers."""
    return tiles.tile_options(dtype, aligned=aligned, block_n=64, hip=hip)


def _options_for(
    hidden_ND: torch.Tensor, head: LmHead, teacher_ND: torch.Tensor, teacher_head: LmHead
) -> dict[str, Any]:
    matrices = (hidden_ND, head.weight_PD, teacher_ND, teacher_head.weight_PD)
    return pair_options(torch.promote_types(hidden_ND.dtype, teacher_ND.dtype), aligned=tiles.aligned(*matrices))


class ChunkedDivergence(torch.autograd.Function):
    """`dense_divergence` on the GPU: same values and gradients. The weight is an argument beside the head that holds
    it, so that it can get a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_PD: torch.Tensor,
        head: LmHead,
        teacher_ND: torch.Tensor,
        teacher_head: LmHead,
        mixture: Mixture,
    ) -> torch.Tensor:
        tokens, width = hidden_ND.shape
        none_N0 = torch.empty(tokens, 0, dtype=torch.int32, device=hidden_ND.device)
        lse_N, teacher_lse_N = (
            streamed_buckets(*pair, none_N0)[1] for pair in ((hidden_ND, head), (teacher_ND, teacher_head))
        )
        options = _options_for(hidden_ND, head, teacher_ND, teacher_head)
        part = tiles.words_per_program(max(tokens, 1), head.vocab_size, options)
        parts = triton.cdiv(head.vocab_size, part)
        value_NS, mean_NS = (torch.empty(tokens, parts, dtype=torch.float32, device=hidden_ND.device) for _ in range(2))
        if tokens:
            with torch.cuda.device_of(hidden_ND):
                value_kernel[(triton.cdiv(tokens, options["BLOCK_N"]), parts)](
                    hidden_ND, weight_PD, teacher_ND, teacher_head.weight_PD, lse_N, teacher_lse_N, value_NS, mean_NS,
                    tokens, head.vocab_size, width, teacher_ND.shape[1], part, parts, *hidden_ND.stride(),
                    *weight_PD.stride(), *teacher_ND.stride(), *teacher_head.weight_PD.stride(),
                    **_both(head, teacher_head), **weights(mixture), **options,
                )  # fmt: skip
        ctx.save_for_backward(
            hidden_ND, weight_PD, teacher_ND, teacher_head.weight_PD, lse_N, teacher_lse_N, mean_NS.sum(-1)
        )
        ctx.head, ctx.teacher_head, ctx.mixture = head, teacher_head, mixture
        return value_NS.sum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (upstream_N,) = grads
        hidden_ND, weight_PD, teacher_ND, teacher_weight_PD, lse_N, teacher_lse_N, mean_N = ctx.saved_tensors
        head, (tokens, width) = ctx.head, hidden_ND.shape
        options = _options_for(hidden_ND, head, teacher_ND, ctx.teacher_head)
        grad_hidden_ND = torch.zeros(tokens, width, dtype=torch.float32, device=hidden_ND.device)
        grad_weight_PD = torch.zeros_like(weight_PD) if ctx.needs_input_grad[1] else None
        block = min(tiles.VOCAB_BLOCK, head.vocab_size)
        gradient_NC = torch.empty(tokens, block, dtype=hidden_ND.dtype, device=hidden_ND.device)
        for start in range(0, head.vocab_size if tokens else 0, block):
            words = slice(start, min(start + block, head.vocab_size))
            weight_CD, teacher_weight_CD, count = weight_PD[words], teacher_weight_PD[words], words.stop - start
            with torch.cuda.device_of(hidden_ND):
                gradient_kernel[(triton.cdiv(tokens, options["BLOCK_N"]), triton.cdiv(count, options["BLOCK_V"]))](
                    hidden_ND, weight_CD, teacher_ND, teacher_weight_CD, lse_N, teacher_lse_N, mean_N, upstream_N,
                    gradient_NC, tokens, count, width, teacher_ND.shape[1], upstream_N.stride(0), gradient_NC.stride(0),
                    *hidden_ND.stride(), *weight_CD.stride(), *teacher_ND.stride(), *teacher_weight_CD.stride(),
                    **_both(head, ctx.teacher_head), **weights(ctx.mixture), **options,
                )  # fmt: skip
            grad_words_CD = grad_weight_PD[words] if grad_weight_PD is not None else None
            tiles.accumulate(gradient_NC[:, :count], hidden_ND, weight_CD, grad_hidden_ND, grad_words_CD)
        return grad_hidden_ND.to(hidden_ND.dtype), grad_weight_PD, None, None, None, None
