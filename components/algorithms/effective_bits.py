"""What a stored value costs in bits, by what the bits are spent on: the one count that rows of evaluate, deployed
memory and model cards share (docs/low-bit.md).

Counted are the bytes that a deployed model would store or move. What all tokens share (the position table) costs no
value anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from .kv_forms import FULL_CACHE, KV_FORMS
from .layer_bits import FULL_PRECISION, SITES, stored_bits
from .low_bit import Scheme, bits_of_sites, bits_of_weights, decoder_layers
from .low_bit_embedding import tables

SCALE_BITS = 16
"""Scales are stored as float16."""
FLAG_BITS = {"plain": 0, "dual": 1}
"""Which grid an activation is on; a list of indices would cost less only below one outlier in ten values."""


@dataclass(frozen=True, kw_only=True)
class Bits:
    """Bits per value, each part's share in it."""

    code: float
    flag: float = 0.0
    scale: float = 0.0
    zero_point: float = 0.0

    @property
    def total(self) -> float:
        return self.code + self.flag + self.scale + self.zero_point

    def __str__(self) -> str:
        parts = {"code": self.code, "flag": self.flag, "scale": self.scale, "zero point": self.zero_point}
        return f"{self.total:.2f} ({', '.join(f'{name} {bits:.2f}' for name, bits in parts.items() if bits)})"


UNQUANTISED = Bits(code=32)


def weight_cost(bits: int, group_size: int, has_zero_point: bool = False) -> Bits:
    """Of a weight in a group that has one scale, and may have a zero point of as many bits as a code."""
    if bits >= FULL_PRECISION:
        return UNQUANTISED
    code = stored_bits(bits)
    return Bits(code=code, scale=SCALE_BITS / group_size, zero_point=code / group_size if has_zero_point else 0.0)


def activation_cost(activation: str, bits: int, channels: int) -> Bits:
    """Of a value in a token of `channels` values, which has one scale of its own."""
    if bits >= FULL_PRECISION:
        return UNQUANTISED
    return Bits(code=bits, flag=FLAG_BITS[activation], scale=SCALE_BITS / channels)


def cache_cost(kv_cache: str, channels: int) -> Bits:
    """Of a cached number, the mean of keys and values, in a head of `channels`; of a form with a window, behind it.

    Grids with a zero point have it in float16, as their scale.
    """
    if kv_cache == FULL_CACHE:
        return UNQUANTISED
    form = KV_FORMS[kv_cache]
    if not form.group:
        return Bits(code=form.bits, scale=SCALE_BITS / channels)
    share = SCALE_BITS * (1 / form.group + 1 / form.value_group(channels)) / 2
    return Bits(code=form.bits, scale=share, zero_point=share)


def head_channels(model: Any) -> int:
    """Channels of an attention head's key."""
    config = model.config
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def costs_of_weights(model: Any, scheme: Scheme) -> dict[str, Bits]:
    """Linear of the decoder layers ('model.layers.3.mlp.down_proj') -> what a weight of it costs; embedding and head
    too if the scheme rounds them.
    """
    costs = {
        f"model.{name}": weight_cost(bits, scheme.group_size, scheme.has_zero_points(bits))
        for name, bits in bits_of_weights(model, scheme).items()
    }
    if scheme.rounds_embedding:
        costs |= {
            name: weight_cost(scheme.embedding_bits, table.weight.shape[1]) for name, table in tables(model).items()
        }
    return costs


def mean_over_weights(model: Any, costs: dict[str, Bits]) -> Bits:
    """Over all weights of the decoder's linear layers; those of a layer without a cost count with 32 bits."""
    modules: Any = decoder_layers(model).named_modules()
    linears = {f"model.layers.{name}": m for name, m in modules if hasattr(m, "in_features")}
    return _mean((m.in_features * m.out_features, costs.get(name, UNQUANTISED)) for name, m in linears.items())


def cost_of_weights(model: Any, scheme: Scheme) -> Bits:
    """Mean over the weights of the decoder's linear layers."""
    return mean_over_weights(model, costs_of_weights(model, scheme))


def cost_of_activations(model: Any, scheme: Scheme) -> Bits:
    """Mean over the values that enter the sites, those in full precision at 32 bits."""
    widths = {name: _input_width(decoder_layers(model)[0].get_submodule(path)) for name, path in SITES.items()}
    counted = []
    for site, bits in bits_of_sites(model, scheme).items():
        channels = widths[site.rpartition(".")[2]]
        counted.append((channels, activation_cost(scheme.activation, bits, channels)))
    return _mean(counted)


def _mean(counted: Iterable[tuple[int, Bits]]) -> Bits:
    """Of (values, bits of each)."""
    counted = list(counted)
    values = sum(n for n, _ in counted)
    shares = {f.name: sum(n * getattr(bits, f.name) for n, bits in counted) / values for f in fields(Bits)}
    return Bits(**shares)


def _input_width(module: Any) -> int:
    """Channels that a linear, or the first linear of a block, receives."""
    return next(m.in_features for m in module.modules() if hasattr(m, "in_features"))
