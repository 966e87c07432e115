"""An embedding of 8 bits, and an output head of 8 bits, with one scale for each token of the vocabulary.

In a small model the embedding is most of what low-bit linears leave: two thirds of the bytes of SmolLM2-135M in W4A4.
Training never moves it, so it is rounded to nearest once, before anything else: the student learns beside the embedding
that is deployed. A head that is tied to the embedding stays tied, to its codes too.

Shapes: V rows of the vocabulary, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .layer_bits import FULL_PRECISION
from .quantizers import SMALLEST_SCALE, weight_values

EMBEDDING_BITS = (8, FULL_PRECISION)
LARGEST_CODE = 127


def check_embedding_bits(bits: int) -> None:
    """ValueError for any but 8 bits, or FULL_PRECISION."""
    if not isinstance(bits, int) or bits not in EMBEDDING_BITS:  # 8.0 would have another digest
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
    on its grid gives its codes back; below 2^-14 * 127 = 0.0078, where float16 has no more normal scales, on a smaller
    one.
    """
    scale_V1 = (weight_VD.abs().amax(-1, keepdim=True) / LARGEST_CODE).to(torch.float16).to(weight_VD.dtype)
    scale_V1 = scale_V1.clamp(min=SMALLEST_SCALE)
    codes_VD = (weight_VD / scale_V1).round().clamp(-LARGEST_CODE, LARGEST_CODE).to(torch.int8)
    return codes_VD, scale_V1


def require_tables(model: Any) -> None:
    """ValueError unless embedding and head are tables and nothing else; the model may be on the meta device."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    family, leave = type(model).__name__, f"leave it at {FULL_PRECISION}"
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None:
        raise ValueError(
            f"embedding_bits 8: {family} changes what it looks up ({type(embedding).__name__}); an nn.Embedding "
            f"without max_norm has a form of 8 bits; {leave}"
        )
    if type(head) is not nn.Linear or head.bias is not None:
        what = f"is a {type(head).__name__}" if type(head) is not nn.Linear else "has a bias"
        raise ValueError(
            f"embedding_bits 8: the output head of {family} {what}; an nn.Linear without a bias has a form of 8 bits; "
            f"{leave}"
        )


def require_grids(model: Any) -> None:
    """ValueError that names the table and the row if its weights are not finite, or larger than a float16 scale
    reaches.
    """
    largest = torch.finfo(torch.float16).max * LARGEST_CODE
    for name, table in tables(model).items():
        reach_V = table.weight.abs().amax(-1)
        beyond_V = ~(reach_V <= largest)  # NaN too
        if beyond_V.any():
            row = int(beyond_V.nonzero()[0])
            raise ValueError(
                f"{name}: row {row} has weights up to {reach_V[row]:.3g}; a scale is a float16, so a row of 8 bits "
                f"reaches {largest:.3g}"
            )


@torch.no_grad()
def round_embedding(model: Any) -> None:
    """Put embedding and head, which have passed the checks above, on their grids, in place."""
    for table in tables(model).values():
        table.weight.copy_(weight_values(*table_codes(table.weight)))
