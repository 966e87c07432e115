"""Forms in which a quantised cache holds keys and values: what a value is once it was stored and is read again.

int8, int4: one symmetric scale for each token and head.
kivi4, kivi2: KIVI (arXiv 2402.02750). Keys have channels that are large in every token, so a key lies on the grid of
its channel in a group of tokens; a value lies on the grid of its token in a group of channels. Both grids have a zero
point, and the newest tokens stay in full precision. Other than in the paper's code, keys and values leave that window
together, a whole group of tokens at a time, and it is 32 tokens, not 128: the answers that are trained on here are so
short that hardly one of their tokens would ever be rounded.

Shapes: B sequences, H KV heads, T tokens, D channels of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from reflux.kernels.dual_scale_quant import largest_code

from .quantizers import SMALLEST_SCALE


@dataclass(frozen=True, kw_only=True)
class KvForm:
    bits: int
    group: int = 0
    """Tokens whose keys share a grid in each channel, and channels whose values share one in each token. 0: keys and
    values alike have one for a token's head.
    """
    window: int = 0
    """Tokens before the newest that are in full precision at least."""

    def settled(self, position: Tensor) -> Tensor:
        """How many of the oldest tokens the token at `position` sees rounded, where that depends on it."""
        return (position - self.window).clamp(min=0) // self.group * self.group

    def rounded_of(self, tokens: int) -> int:
        """How many of so many cached tokens are rounded for the next one."""
        return int(self.settled(torch.tensor(tokens))) if self.group else tokens

    def value_group(self, channels: int) -> int:
        """Channels of a value that share a grid: the group, or its largest share that divides the channels."""
        return math.gcd(self.group, channels)


FULL_CACHE = "full"
"""Keys and values as they come."""
KV_FORMS = {
    "int8": KvForm(bits=8),
    "int4": KvForm(bits=4),
    "kivi4": KvForm(bits=4, group=32, window=32),
    "kivi2": KvForm(bits=2, group=32, window=32),
}


def check_kv_cache(name: str) -> None:
    """ValueError for a cache of no known form."""
    if name != FULL_CACHE and name not in KV_FORMS:
        raise ValueError(f"kv_cache {name!r}: allowed are {', '.join([FULL_CACHE, *KV_FORMS])}")


def rounded_per_token(x_BHTD: Tensor, bits: int) -> Tensor:
    """Keys or values on the symmetric grid of their token and head; the scale is stored as float16."""
    top = largest_code(bits)
    wide_BHTD = _wide(x_BHTD)
    scale_BHT1 = _stored_scale(wide_BHTD.abs().amax(-1, keepdim=True) / top)
    return _passing_gradients(x_BHTD, (wide_BHTD / scale_BHT1).round().clamp(-top, top) * scale_BHT1)


def rounded_keys(key_BHTD: Tensor, group_BT: Tensor, bits: int) -> Tensor:
    """Keys on the grids of their channels. `group_BT` numbers the groups of tokens of each row from 0 on."""
    wide_BHTD = _wide(key_BHTD)
    index_BHTD = group_BT[:, None, :, None].expand_as(wide_BHTD)
    lowest, highest = (
        wide_BHTD.new_zeros(*wide_BHTD.shape[:2], int(group_BT.max()) + 1, wide_BHTD.shape[-1])
        .scatter_reduce(2, index_BHTD, wide_BHTD, reduce, include_self=False)
        .gather(2, index_BHTD)
        for reduce in ("amin", "amax")
    )
    return _passing_gradients(key_BHTD, _between(wide_BHTD, lowest, highest, bits))


def rounded_group(key_GHD: Tensor, bits: int) -> Tensor:
    """The keys of one group of tokens, which stand in the third dimension from the last."""
    wide_GHD = _wide(key_GHD)
    ends = wide_GHD.amin(-3, keepdim=True), wide_GHD.amax(-3, keepdim=True)
    return _between(wide_GHD, *ends, bits).to(key_GHD.dtype)


def rounded_values(value_BHTD: Tensor, form: KvForm) -> Tensor:
    """Values on the grids of their tokens, in groups of channels."""
    wide = _wide(value_BHTD).unflatten(-1, (-1, form.value_group(value_BHTD.shape[-1])))
    rounded = _between(wide, wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True), form.bits)
    return _passing_gradients(value_BHTD, rounded.flatten(-2))


def _between(x: Tensor, lowest: Tensor, highest: Tensor, bits: int) -> Tensor:
    """On 2^bits steps from the lowest to the highest value of each group; scale and zero point are stored as
    float16.
    """
    top = 2**bits - 1
    scale, zero = _stored_scale((highest - lowest) / top), lowest.to(torch.float16).to(x.dtype)
    return ((x - zero) / scale).round().clamp(0, top) * scale + zero


def _stored_scale(scale: Tensor) -> Tensor:
    return scale.to(torch.float16).to(scale.dtype).clamp(min=SMALLEST_SCALE)


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def _passing_gradients(x: Tensor, rounded: Tensor) -> Tensor:
    """The rounded value to the bit, and the gradient of `x` itself."""
    return rounded.to(x.dtype) + (x - x.detach())
