"""Embedding and output head as codes of 8 bits, computed by torch's own CPU kernel: what low_bit_embedding.py rounds,
with the memory and the time that it has when deployed.

Shapes: V rows of the vocabulary, D hidden, N tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .cpu_kernels import CodedWeight
from .low_bit_embedding import both_ends

BFLOAT16_WIDTHS = 16
"""Torch's kernel reads past the end of a row in bfloat16 where its width is no multiple of this; not in float32."""


class CodedTable(nn.Module):
    """Codes and scales, with the weight restored for whoever asks."""

    codes_VD: Tensor
    scale_V: Tensor

    def __init__(self, coded: CodedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("codes_VD", coded.codes_OI)
        self.register_buffer("scale_V", coded.scale_OG[:, 0].to(dtype))

    @property
    def weight(self) -> Tensor:
        """[V, D]"""
        return self.codes_VD * self.scale_V[:, None]


class CodedEmbedding(CodedTable):
    """Restores the rows of the tokens that come."""

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.embedding(ids, self.codes_VD) * self.scale_V[ids][..., None]


class CodedHead(CodedTable):
    """Multiplies hidden states with codes by torch's kernel for weights of 8 bits."""

    bias = None

    def forward(self, hidden: Tensor) -> Tensor:
        hidden_ND, scale_V = hidden.reshape(-1, hidden.shape[-1]).contiguous(), self.scale_V
        if hidden_ND.shape[1] % BFLOAT16_WIDTHS:
            hidden_ND, scale_V = hidden_ND.float(), scale_V.float()
        logits = torch.ops.aten._weight_int8pack_mm(hidden_ND, self.codes_VD, scale_V)
        return logits.to(hidden.dtype).reshape(*hidden.shape[:-1], -1)


def use_coded_tables(model: Any, coded: dict[str, CodedWeight], dtype: torch.dtype) -> None:
    """Put codes in the place of embedding and head; `coded` has one table if the two are tied."""
    of_embedding, of_head = both_ends(model)
    embedding = CodedEmbedding(coded[of_embedding], dtype)
    head = CodedHead(coded.get(of_head, coded[of_embedding]), dtype)
    if of_head not in coded:
        head.codes_VD, head.scale_V = embedding.codes_VD, embedding.scale_V
    model.set_submodule(of_embedding, embedding)
    model.set_submodule(of_head, head)
