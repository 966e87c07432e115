"""Activation checkpointing: a decoder layer keeps its input and is computed again when its gradient is due.

The values are the same to the last bit, since a layer draws nothing; memory of the backward pass falls to one layer's,
for about a third more work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from .low_bit import decoder_layers


def recompute_layers(model: Any) -> None:
    """Have every decoder layer of `model` recomputed in the backward pass, from now on."""
    for layer in decoder_layers(model):
        layer.forward = functools.partial(_recomputed, layer.forward)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
