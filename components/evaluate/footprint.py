"""Bytes and bits of a scheme as it would be deployed, whatever form it has while it is simulated here."""

from __future__ import annotations

from typing import Any

from reflux.components.algorithms.effective_bits import Bits, cache_cost, head_channels
from reflux.components.algorithms.kv_forms import FULL_CACHE, KV_FORMS
from reflux.components.algorithms.low_bit import Scheme
from reflux.components.bundles.bundle import held_elsewhere

TABLE_VALUE_BYTES = 4
"""The policy table is float32."""


def deployed_bytes(model: Any, costs: dict[str, Bits], scheme: Scheme) -> int:
    """The weights that have `costs`, by layer, at these; everything else (norms, the scheme's policy table, an
    embedding that is not rounded) in full precision. A tied embedding counts once.
    """
    bits = 0.0
    for name, cost in costs.items():
        layer = model.get_submodule(name)  # one of others' linears may have no weight
        values = layer.in_features * layer.out_features if hasattr(layer, "in_features") else layer.weight.numel()
        bits += values * cost.total
    for name, p in model.named_parameters():  # without repeats
        module, _, own = name.rpartition(".")
        if not held_elsewhere(name) and not (module in costs and own.startswith("weight")):
            bits += 8 * p.numel() * p.element_size()
    table = model.policy.scales().numel() * TABLE_VALUE_BYTES if scheme.needs_policy else 0
    return round(bits / 8) + table


def cache_bytes(model: Any, scheme: Scheme, tokens: int) -> int:
    """Keys and values of one sequence in the scheme's cache, those in a window of full precision in the model's own
    type.
    """
    config, channels = model.config, head_channels(model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    full = 8 * model.dtype.itemsize
    cost, rounded = full, 0
    if scheme.kv_cache != FULL_CACHE:
        cost, rounded = cache_cost(scheme.kv_cache, channels).total, KV_FORMS[scheme.kv_cache].rounded_of(tokens)
    bits_of_number = rounded * cost + (tokens - rounded) * full
    return round(2 * config.num_hidden_layers * heads * channels * bits_of_number / 8)


def held_bytes(model: Any) -> int:
    """Bytes of the parameters and buffers that the model has in memory, each once. They are what a model on low-bit
    kernels really takes, and say nothing of one that imitates them.
    """
    held = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    return sum(t.numel() * t.element_size() for t in held.values())
