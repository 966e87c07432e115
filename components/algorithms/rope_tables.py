"""Rotary position tables of 8 bits: sine and cosine as a deployed table of integers would hold them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from reflux.kernels.dual_scale_quant import largest_code

from .layer_bits import FULL_PRECISION

ROPE_BITS = (8, FULL_PRECISION)


def check_rope_bits(bits: int) -> None:
    """ValueError for any but 8 bits, or FULL_PRECISION."""
    if bits not in ROPE_BITS:
        raise ValueError(
            f"rope_bits {bits}: allowed are 8, or {FULL_PRECISION} for tables that are not rounded. A table is shared "
            "by all tokens, so fewer bits save nothing, and at 4 bits angles a quarter apart fall together: perplexity "
            "rises by 1.6 % within 512 tokens, where 8 bits cost nothing"
        )


def rounded_table(table: Tensor, bits: int, largest: float = 1.0) -> Tensor:
    """Sines or cosines on the symmetric grid that ends at `largest`, the factor of some models' tables."""
    step = largest / largest_code(bits)
    return ((table.to(torch.promote_types(table.dtype, torch.float32)) / step).round() * step).to(table.dtype)


def round_rope(model: Any, bits: int) -> None:
    """From now on `model` rotates queries and keys by tables of so many bits, wherever it rounds activations.

    ValueError if the decoder does not keep its rotary embedding in `model.model.rotary_emb`.
    """
    rotary = getattr(model.model, "rotary_emb", None)
    if not isinstance(rotary, nn.Module):
        raise ValueError(f"rope_bits {bits}: {type(model).__name__} has no rotary embedding in model.rotary_emb")

    def after(module: Any, args: tuple, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, ...] | None:
        if not model.rounds_activations:
            return None
        return tuple(rounded_table(table, bits, getattr(module, "attention_scaling", 1.0)) for table in tables)

    rotary.register_forward_hook(after)
