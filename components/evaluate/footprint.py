"""Bytes and bits of a scheme as it would be deployed, whatever form it has while it is simulated here."""

from __future__ import annotations

from typing import Any

from torch import nn

from reflux.components.algorithms.cpu_kernels import Int4Linear, IntegerLinear
from reflux.components.algorithms.low_bit import FULL_PRECISION, SITES, LowBitLinear, Scheme, decoder_layers
from reflux.components.bundle import held_elsewhere, quantized_linears

TABLE_VALUE_BYTES = 4
"""The policy table is float32."""


def deployed_bytes(model: Any, scheme: Scheme) -> int:
    """Codes and scales of the quantised weights, everything else (embedding, norms, policy table) in full precision.

    A tied embedding counts once.
    """
    quantised = scheme.weight_bits < FULL_PRECISION
    low_bit = {f"{name}.weight" for name in quantized_linears(model)} if quantised else set()
    bits = sum(
        p.numel() * (scheme.effective_bits() if name in low_bit else 8 * p.element_size())
        for name, p in model.named_parameters()  # without repeats
        if not held_elsewhere(name)
    )
    table = model.policy.scales().numel() * TABLE_VALUE_BYTES if scheme.needs_policy else 0
    return round(bits / 8) + table


def held_bytes(model: Any) -> int:
    """Bytes of the parameters and buffers that the model has in memory, each once. They are what a model on low-bit
    kernels really takes, and say nothing of one that imitates them.
    """
    held = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    return sum(t.numel() * t.element_size() for t in held.values())


def activation_bits(model: Any, scheme: Scheme) -> float:
    """Effective bits per quantised activation, mean over the values of all sites."""
    layer = decoder_layers(model)[0]
    widths = [_input_width(layer.get_submodule(path)) for path in SITES.values()]
    return sum(width * scheme.effective_bits_activation(width) for width in widths) / sum(widths)


def _input_width(module: Any) -> int:
    """Channels that the first linear of a block, or a linear itself, receives."""
    linears = (m for m in module.modules() if isinstance(m, nn.Linear | LowBitLinear | IntegerLinear | Int4Linear))
    linear = next(linears)
    return linear.weight.shape[1] if isinstance(linear, LowBitLinear) else linear.in_features
