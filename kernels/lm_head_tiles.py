"""A block of logits in registers, and how large it is: what the fused losses share.

The product follows torch's own setting for float32 matrices (`torch.backends.cuda.matmul.allow_tf32`); narrower types
are multiplied as they are and summed in float32, so that logits are never rounded to them. Shapes: N tokens, V words,
D hidden; a block has BLOCK_N, BLOCK_V, BLOCK_D of them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .lm_head import LmHead

VOCAB_BLOCK = 4096
"""Words whose gradients are in memory at once: wide enough for a full-speed product, a 30th of a large vocabulary."""
PROGRAMS = 264
"""Programs that a pass over the vocabulary is cut into at least, where it is long enough: two for each of 132 cores."""


@triton.jit
def logits_tile(
    hidden_ptr, weight_ptr, token_N, within_N, word_V, within_V, width, hidden_row, hidden_column, weight_row,
    weight_column, scale, soft_cap, CAPPED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_V] float32 logits of tokens and words, after scale and cap; indices are int64, since rows times
    width may exceed 2^31.
    """
    product_NV = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    for start in range(0, width, BLOCK_D):
        column_D = (start + tl.arange(0, BLOCK_D)).to(tl.int64)
        within_D = column_D < width
        hidden_ND = tl.load(
            hidden_ptr + token_N[:, None] * hidden_row + column_D[None, :] * hidden_column,
            mask=within_N[:, None] & within_D[None, :], other=0.0,
        )  # fmt: skip
        weight_DV = tl.load(
            weight_ptr + word_V[None, :] * weight_row + column_D[:, None] * weight_column,
            mask=within_V[None, :] & within_D[:, None], other=0.0,
        )  # fmt: skip
        product_NV = tl.dot(hidden_ND, weight_DV, product_NV, input_precision=PRECISION)
    logits_NV = product_NV * scale
    if CAPPED:  # tanh by what every target and the interpreter have; exp may overflow, which gives the cap
        logits_NV = soft_cap * (1.0 - 2.0 / (tl.exp(2.0 * logits_NV / soft_cap) + 1.0))
    return logits_NV


@triton.jit
def logits_slope(logits_NV, scale, soft_cap, CAPPED: tl.constexpr):
    """Derivative of the logits with respect to the bare product of hidden states and weight."""
    if CAPPED:
        capped_NV = logits_NV / soft_cap
        return scale * (1.0 - capped_NV * capped_NV)
    return logits_NV * 0.0 + scale


def slope(logits: torch.Tensor, head: LmHead) -> torch.Tensor | float:
    """`logits_slope` for a few logits outside a kernel."""
    return head.scale * (1 - (logits / head.soft_cap).square()) if head.soft_cap else head.scale


def tile_options(dtype: torch.dtype, *, aligned: bool, block_n: int = 128, hip: bool | None = None) -> dict[str, Any]:
    """Block sizes, warps and stages for hidden states of this dtype: within the shared memory and registers of every
    GPU that tests/kernels/test_compiles.py names. What is not `aligned` is read number by number, and each needs a
    register for its address.
    """
    hip = torch.version.hip is not None if hip is None else hip
    single = dtype == torch.float32
    return {
        "PRECISION": "tf32" if single and torch.backends.cuda.matmul.allow_tf32 else "ieee",
        "BLOCK_N": block_n // 2 if single or not aligned else block_n,
        "BLOCK_V": 64 if single or not aligned else 128,
        "BLOCK_D": 64 if aligned and not single else 16,
        "num_warps": 4 if hip else 8,  # 256 threads of either
        "num_stages": 2 if hip else 3,
    }


def aligned(*matrices: torch.Tensor) -> bool:
    """Whether rows can be read 16 bytes at a time, as those of nearly all models can."""
    return all(m.data_ptr() % 16 == 0 and m.stride(1) == 1 and m.stride(0) % 16 == 0 for m in matrices)


def transform(head: LmHead) -> dict[str, Any]:
    """What a kernel is told of scale and cap."""
    return {"scale": float(head.scale), "soft_cap": float(head.soft_cap), "CAPPED": head.soft_cap > 0}


def words_per_program(tokens: int, vocab_size: int, options: dict[str, Any]) -> int:
    """How a pass over the vocabulary is cut, in whole blocks: the same cut, and so the same sums, on every machine."""
    blocks = triton.cdiv(vocab_size, options["BLOCK_V"])
    parts = min(blocks, triton.cdiv(PROGRAMS, triton.cdiv(tokens, options["BLOCK_N"])))
    return triton.cdiv(blocks, parts) * options["BLOCK_V"]


def accumulate(
    grad_NV: torch.Tensor,
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    grad_hidden_ND: torch.Tensor,
    grad_weight_VD: torch.Tensor | None,
) -> None:
    """Add what the gradient of one block of logits gives, to float32 sums of the hidden states' and, in place, as the
    only block of these words, to the weight's.
    """
    grad_hidden_ND += grad_NV @ weight_VD
    if grad_weight_VD is not None:
        torch.mm(grad_NV.T, hidden_ND, out=grad_weight_VD)
