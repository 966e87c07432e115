"""From final hidden states to logits, a few rows at a time.

A model's own forward makes the logits of all its tokens at once; at full vocabulary that is most of the memory of an
evaluation. Here the body runs alone and the head is applied to the rows that are asked for, with the transforms that
some families put behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .wide_product import wide_product

OutputHead = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class ModelHead:
    """A model's own output head: projection, scale and soft cap. Keeps the projection alive, not the model."""

    projection: Any
    factor: float
    divisor: float
    cap: float | None

    def __call__(self, hidden_ND: Tensor) -> Tensor:
        """[N, P] logits."""
        if isinstance(self.projection, torch.nn.Linear):
            logits_NP = wide_product(hidden_ND, self.projection.weight)
            if self.projection.bias is not None:
                logits_NP = logits_NP + self.projection.bias
        else:  # of codes, which stay codes
            logits_NP = self.projection(hidden_ND)
        if self.factor != self.divisor:
            logits_NP = logits_NP * self.factor / self.divisor
        return logits_NP if self.cap is None else torch.tanh(logits_NP / self.cap) * self.cap


def final_hidden_states(model: Any, input_BT: Tensor, mask_BT: Tensor | None, position_BT: Tensor) -> Tensor:
    """[B, T, D] what the output head reads: the last layer's output after the final norm. Without a mask, a row's
    sequences are told apart by their positions, which begin at 0.
    """
    return model.model(
        input_ids=input_BT, attention_mask=mask_BT, position_ids=position_BT, use_cache=False
    ).last_hidden_state


def output_head(model: Any) -> ModelHead:
    """[N, D] hidden states -> [N, P] logits, as the model itself makes them.

    The result is compared with the model's own forward once, on three tokens: ValueError if this family transforms its
    logits in a way that is not known here.
    """
    projection = model.get_output_embeddings()
    head = ModelHead(
        projection=projection,
        factor=getattr(model.config, "logit_scale", None) or 1.0,  # Cohere
        divisor=getattr(model.config, "logits_scaling", None) or 1.0,  # Granite
        cap=getattr(model.config, "final_logit_softcapping", None),  # Gemma
    )
    with torch.no_grad():
        position_BT = torch.arange(3, device=model.device)[None]
        input_BT, mask_BT = position_BT + 1, torch.ones_like(position_BT)
        own_NP = model(input_ids=input_BT, attention_mask=mask_BT, position_ids=position_BT).logits[0]
        ours_NP = head(final_hidden_states(model, input_BT, mask_BT, position_BT)[0])
    if not torch.allclose(own_NP, ours_NP, rtol=1e-2, atol=1e-2, equal_nan=True):
        raise ValueError(f"{type(model).__name__}: its logits are transformed in a way that reflux does not know")
    return head
