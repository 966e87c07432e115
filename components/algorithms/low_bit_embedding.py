"""An embedding of 8 bits, and an output head of 8 bits, with one scale for each token of the vocabulary.

In a small model the embedding is most of what low-bit linears leave: two thirds of the bytes of SmolLM2-135M in W4A4.
Training never moves it, so it is rounded to nearest once, before anything else: the student learns beside the embedding
that is deployed. A head that is tied to the embedding stays tied, to its codes too.

Shapes: V rows of the vocabulary, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .layer_bits import FULL_PRECISION
from .quantizers import SMALLEST_SCALE, weight_values

EMBEDDING_BITS = (8, FULL_PRECISION)
LARGEST_CODE = 127


def check_embedding_bits(bits: int) -> None:
    """ValueError for any but 8 bits, or FULL_PRECISION."""
    if bits not in EMBEDDING_BITS:
        raise ValueError(
            f"embedding_bits {bits}: allowed are 8, or {FULL_PRECISION} for an embedding that is not rounded"
        )


def both_ends(model: Any) -> dict[str, Any]:
    """Embedding and output head, by name in the model."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    return {name: module for end in ends for name, module in model.named_modules() if module is end}


def tables(model: Any) -> dict[str, Any]:
    """Embedding, and head where that has a weight of its own, by name in the model."""
    (of_embedding, embedding), (of_head, head) = both_ends(model).items()
    return {of_embedding: embedding} if head.weight is embedding.weight else {of_embedding: embedding, of_head: head}


def table_codes(weight_VD: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [V, D] and scales [V, 1] (float16 values): each row's largest |w| falls on code 127, so that a table
    on its grid gives its codes back.
    """
    scale_V1 = (weight_VD.abs().amax(-1, keepdim=True) / LARGEST_CODE).to(torch.float16).to(weight_VD.dtype)
    scale_V1 = scale_V1.clamp(min=SMALLEST_SCALE)
    codes_VD = (weight_VD / scale_V1).round().clamp(-LARGEST_CODE, LARGEST_CODE).to(torch.int8)
    return codes_VD, scale_V1


@torch.no_grad()
def round_embedding(model: Any) -> None:
    """Put embedding and head on their grids, in place. ValueError, before either is touched, for weights that no grid
    holds, and for a head with a bias.
    """
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ValueError(f"{type(model).__name__}: its output head has a bias, with which it has no form of 8 bits")
    rounded_VD = {}
    for name, table in tables(model).items():
        rounded_VD[name] = weight_values(*table_codes(table.weight))
        if not rounded_VD[name].isfinite().all():
            raise ValueError(f"{name}: has weights that are not finite, or too large for a scale in float16")
    for name, weight_VD in rounded_VD.items():
        model.get_submodule(name).weight.copy_(weight_VD)
