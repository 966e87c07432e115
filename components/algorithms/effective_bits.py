"""What a stored value costs in bits, by what the bits are spent on: the one count that rows of evaluate, deployed
memory and model cards share (docs/low-bit.md).

Counted are the bytes that a deployed model would store or move. What all tokens share (the position table) costs no
value anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .layer_bits import FULL_PRECISION, SITES, stored_bits
from .low_bit import Scheme, bits_of_sites, bits_of_weights, decoder_layers

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

    @property
    def total(self) -> float:
        return self.code + self.flag + self.scale

    def __str__(self) -> str:
        parts = {"code": self.code, "flag": self.flag, "scale": self.scale}
        return f"{self.total:.2f} ({', '.join(f'{name} {bits:.2f}' for name, bits in parts.items() if bits)})"


UNQUANTISED = Bits(code=32)


def weight_cost(bits: int, group_size: int) -> Bits:
    """Of a weight in a group that has one scale."""
    return UNQUANTISED if bits >= FULL_PRECISION else Bits(code=stored_bits(bits), scale=SCALE_BITS / group_size)


def activation_cost(activation: str, bits: int, channels: int) -> Bits:
    """Of a value in a token of `channels` values, which has one scale of its own."""
    if bits >= FULL_PRECISION:
        return UNQUANTISED
    return Bits(code=bits, flag=FLAG_BITS[activation], scale=SCALE_BITS / channels)


def cost_of_weights(model: Any, scheme: Scheme) -> Bits:
    """Mean over the weights of the decoder's linear layers, those in full precision at 32 bits."""
    layers = decoder_layers(model)
    counted = []
    for name, bits in bits_of_weights(model, scheme).items():
        linear: Any = layers.get_submodule(name.removeprefix("layers."))
        counted.append((linear.in_features * linear.out_features, weight_cost(bits, scheme.group_size)))
    return _mean(counted)


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
    return Bits(
        code=sum(n * bits.code for n, bits in counted) / values,
        flag=sum(n * bits.flag for n, bits in counted) / values,
        scale=sum(n * bits.scale for n, bits in counted) / values,
    )


def _input_width(module: Any) -> int:
    """Channels that a linear, or the first linear of a block, receives."""
    return next(m.in_features for m in module.modules() if hasattr(m, "in_features"))
