"""Bytes and bits of a scheme as it would be deployed, whatever form it has while it is simulated here."""

from __future__ import annotations

from typing import Any

from reflux.components.algorithms.effective_bits import weight_cost
from reflux.components.algorithms.low_bit import Scheme
from reflux.components.bundles.bundle import held_elsewhere, quantized_bits

TABLE_VALUE_BYTES = 4
"""The policy table is float32."""


def deployed_bytes(model: Any, scheme: Scheme) -> int:
    """Codes and scales of the quantised weights, everything else (embedding, norms, policy table) in full precision.

    A tied embedding counts once.
    """
    of_linear = {f"{name}.weight": bits for name, bits in quantized_bits(model, scheme).items()}
    cost = {name: weight_cost(bits, scheme.group_size).total for name, bits in of_linear.items()}
    bits = sum(
        p.numel() * cost.get(name, 8 * p.element_size())
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
