"""Changes of a model's weights that leave what it computes: checked before, and probed after.

Shapes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

CHECKED_TOKENS = 8
PARTS = (
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
"""Of a decoder layer, which are changed."""


@contextmanager
def same_function(model: Any, change: str) -> Iterator[None]:
    """Around a change of the weights, `change` being its verb ('rotate').

    ValueError, and an unchanged model, if it lacks PARTS or a weight is not finite; ValueError if it computes something
    else afterwards: then it is built in a way that is not known here.
    """
    require_parts(model, change)
    for name, p in model.named_parameters():
        if not p.isfinite().all():
            raise ValueError(f"{name}: is not finite everywhere; to {change} it would spoil more channels than its own")
    before = _probed(model)
    yield
    if not torch.allclose(before, _probed(model), rtol=1e-2, atol=1e-2):
        raise ValueError(
            f"{type(model).__name__}: computes something else afterwards, reflux does not know how to {change} it"
        )


def require_parts(model: Any, change: str) -> None:
    """ValueError if a decoder layer lacks one of PARTS; the model may be on the meta device."""
    for layer in model.model.layers:
        for part in PARTS:
            try:
                layer.get_submodule(part)
            except AttributeError:
                raise ValueError(f"{type(model).__name__}: has no {part}, reflux cannot {change} it") from None


def _probed(model: Any) -> Tensor:
    """[T, V] logits of a few tokens."""
    position_BT = torch.arange(CHECKED_TOKENS, device=model.lm_head.weight.device)[None]
    return model(input_ids=position_BT + 1, position_ids=position_BT, use_cache=False).logits[0]
