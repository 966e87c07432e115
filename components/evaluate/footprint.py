"""Bytes and bits of a scheme as it would be deployed, whatever form it has while it is simulated here."""

from __future__ import annotations

from typing import Any

from reflux.components.algorithms.effective_bits import Bits
from reflux.components.algorithms.low_bit import Scheme
from reflux.components.bundles.bundle import held_elsewhere

TABLE_VALUE_BYTES = 4
"""The policy table is float32."""


def deployed_bytes(model: Any, costs: dict[str, Bits], scheme: Scheme) -> int:
    """The weights of linear layers at their `costs` by layer, everything else (embedding, norms, the scheme's policy
    table) in full precision. A tied embedding counts once.
    """
    bits = 0.0
    for name, cost in costs.items():
        linear = model.get_submodule(name)
        bits += linear.in_features * linear.out_features * cost.total
    for name, p in model.named_parameters():  # without repeats
        module, _, own = name.rpartition(".")
        if not held_elsewhere(name) and not (module in costs and own.startswith("weight")):
            bits += 8 * p.numel() * p.element_size()
    table = model.policy.scales().numel() * TABLE_VALUE_BYTES if scheme.needs_policy else 0
    return round(bits / 8) + table


def held_bytes(model: Any) -> int:
    """Bytes of the parameters and buffers that the model has in memory, each once. They are what a model on low-bit
    kernels really takes, and say nothing of one that imitates them.
    """
    held = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    return sum(t.numel() * t.element_size() for t in held.values())
