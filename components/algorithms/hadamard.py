"""Rotate a model before it is quantised, so that outliers are spread over many channels (QuaRot, arXiv 2404.00456).

The rotation is a Hadamard matrix; where a width is no power of two it is block-diagonal, of the largest blocks whose
size is one and divides the width (576: nine of 64). What a model computes does not change:

- the residual stream is turned by R = S H, S random signs. R is folded into the embedding and into every linear that
  writes to the stream or reads from it; a norm's weights are folded first into the linears that read it, since only a
  norm without weights is the same before and after a rotation;
- the values of each head are turned by H, folded into v_proj and o_proj;
- what enters down_proj is turned by H in the forward itself, since a product of two activations comes before it, and
  H is folded into down_proj.

A tied head is untied: the embedding is turned as it stands, the head with the weights of the last norm in it. That
costs another vocabulary times width parameters. Keys are not turned: their rotation would stand behind RoPE, in the
forward again, and nothing but the cache would gain.

Shapes: D hidden channels, F intermediate channels, O outputs, I inputs, V rows of the embedding.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .same_function import same_function

NO_ROTATION = "none"
ROTATIONS = (NO_ROTATION, "hadamard")

SEED = 0
"""Of the signs: equal models get equal rotations."""


def check_rotation(name: str) -> None:
    """ValueError for a rotation that is not known."""
    if name not in ROTATIONS:
        raise ValueError(f"rotation {name!r}: allowed are {', '.join(ROTATIONS)}")


def walsh_hadamard(x: Tensor) -> Tensor:
    """`x` times H on the last dimension, H symmetric and orthogonal, block-diagonal as said above."""
    size, step = block_size(x.shape[-1]), 1
    y = x.unflatten(-1, (-1, size))
    while step < size:
        first, second = y.unflatten(-1, (-1, 2, step)).unbind(-2)
        y = torch.stack([first + second, first - second], -2).flatten(-3)
        step *= 2
    return y.flatten(-2) * size**-0.5


def block_size(width: int) -> int:
    """The largest power of two that divides the width."""
    return width & -width


def residual_signs(width: int) -> Tensor:
    """[D] 1 or −1, as int8: the diagonal of S."""
    return torch.randint(0, 2, (width,), generator=torch.Generator().manual_seed(SEED), dtype=torch.int8) * 2 - 1


def turned(x: Tensor) -> Tensor:
    """`x` R on the last dimension."""
    return walsh_hadamard(x * residual_signs(x.shape[-1]).to(x))


def turned_back(x: Tensor) -> Tensor:
    """`x` times the transpose of R."""
    return walsh_hadamard(x) * residual_signs(x.shape[-1]).to(x)


def in_common_basis(model: Any, hidden: Tensor) -> Tensor:
    """States of the residual stream as a model that is not rotated would have them."""
    return turned_back(hidden) if getattr(model, "is_rotated", False) else hidden


@torch.no_grad()
def rotate(model: Any) -> None:
    """Turn the weights of a causal language model in place, computed in float64; `turn_down_inputs` has to follow.

    ValueError as in `same_function`.
    """
    with same_function(model, "rotate"):
        _untie(model)
        decoder = model.model
        _set(decoder.embed_tokens.weight, turned(_of(decoder.embed_tokens.weight)))
        for layer in decoder.layers:
            _rotate_layer(layer)
        _fold_norm(decoder.norm, [model.lm_head])
        _set(model.lm_head.weight, turned(_of(model.lm_head.weight)))
        handles = turn_down_inputs(model, decoder.layers)
    for handle in handles:
        handle.remove()


def _rotate_layer(layer: Any) -> None:
    attention, mlp = layer.self_attn, layer.mlp
    _fold_norm(layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj])
    _fold_norm(layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj])
    _turn_heads(attention)
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
        _set(linear.weight, turned(_of(linear.weight)))
    _set(mlp.down_proj.weight, walsh_hadamard(_of(mlp.down_proj.weight)))
    for linear in (attention.o_proj, mlp.down_proj):
        _set(linear.weight, turned(_of(linear.weight).t()).t())
        if linear.bias is not None:
            _set(linear.bias, turned(_of(linear.bias)))


def turn_down_inputs(model: Any, layers: Iterable[Any]) -> list[Any]:
    """Turn what enters each down_proj of a rotated model from now on, before hooks that are registered later see it.
    Returns the handles of the hooks.
    """
    model.is_rotated = True
    return [layer.mlp.down_proj.register_forward_pre_hook(lambda _, args: walsh_hadamard(args[0])) for layer in layers]


def _fold_norm(norm: Any, readers: list[Any]) -> None:
    for linear in readers:
        _set(linear.weight, _of(linear.weight) * _of(norm.weight))
    norm.weight.fill_(1.0)


def _turn_heads(attention: Any) -> None:
    """Turn the values of each head where they are made, and where the heads are read."""
    channels = attention.head_dim
    value, output = attention.v_proj, attention.o_proj
    weight_IHd = _of(value.weight).t().unflatten(-1, (-1, channels))
    _set(value.weight, walsh_hadamard(weight_IHd).flatten(-2).t())
    if value.bias is not None:
        _set(value.bias, walsh_hadamard(_of(value.bias).unflatten(-1, (-1, channels))).flatten(-2))
    _set(output.weight, walsh_hadamard(_of(output.weight).unflatten(-1, (-1, channels))).flatten(-2))


def _untie(model: Any) -> None:
    if model.lm_head.weight is model.model.embed_tokens.weight:
        weight = model.lm_head.weight
        model.lm_head.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
        model.config.tie_word_embeddings = False


def _of(parameter: Tensor) -> Tensor:
    return parameter.detach().double()


def _set(parameter: Tensor, value: Tensor) -> None:
    parameter.copy_(value.to(parameter.dtype))
