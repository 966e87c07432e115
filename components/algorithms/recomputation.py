"""Activation checkpointing: a decoder layer keeps less for the backward pass and computes the rest again there.

`full` keeps a layer's input alone and runs the layer twice, for about a third more work. `selective` keeps what the
products and the attention gave, which is where a layer's time goes, and computes again what lies between them: norms,
rotations, rounding, gates. That is half of what a layer keeps, for a twentieth more work. The values are the same to
the last bit, since a layer draws nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .low_bit import decoder_layers

NONE, SELECTIVE = "none", "selective"
"""Modes with a part of their own; any other recomputes whole layers."""

FORWARD_STATE = ("main_scales", "policy_reading")
"""What hooks keep at the decoder of the forward that is under way (low_bit.py, policy_networks.py)."""

_ATEN = torch.ops.aten
_KEPT = {
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
}


def recompute_layers(model: Any, mode: str) -> None:
    """Have every decoder layer of `model` recomputed in the backward pass, from now on: `mode` is distill's
    activation_checkpointing.
    """
    if mode == NONE:
        return
    contexts = functools.partial(create_selective_checkpoint_contexts, _keep) if mode == SELECTIVE else None
    how = {"context_fn": contexts} if contexts else {}
    for layer in decoder_layers(model):
        layer.forward = functools.partial(_recomputed, layer.forward, model.model, how)


def _recomputed(forward: Callable[..., Any], decoder: Any, how: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    state = _state_of(decoder)

    def with_its_state(*args: Any, **kwargs: Any) -> Any:
        """Another forward may have begun before this one's gradient is due."""
        now = _state_of(decoder)
        vars(decoder).update(state)
        try:
            return forward(*args, **kwargs)
        finally:
            vars(decoder).update(now)

    return checkpoint(with_its_state, *args, use_reentrant=False, preserve_rng_state=False, **how, **kwargs)


def _state_of(decoder: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(decoder).items() if name in FORWARD_STATE}


def _keep(_context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
