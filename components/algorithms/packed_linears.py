"""Linear layers with their weights laid out for oneDNN, for forwards of few rows on a CPU.

A step of decoding multiplies every weight with a handful of rows. MKL, which torch takes for float32, packs the weights
anew in every call; packed once, they are read at the speed of memory: two to four times as fast at 8 to 32 rows
(LOG.md, 2026-11-29). Shapes: O output channels, I input channels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from .low_bit import LowBitLinear

ROWS = 32
"""Rows of a product that the layout is chosen for; it serves any number."""


@contextmanager
def packed_linears(model: Any) -> Iterator[None]:
    """Within the block, the linears of `model` compute from their weights as these are now, a low-bit one from its
    rounded weight, and give no gradient. On a CPU float32 weights are packed for it; those of another type torch gives
    to oneDNN by itself.

    A weight is packed instead of held, and laid out again, the same to the bit, at the end of the block, in which
    nobody else may read it. Held beside it are rounded weights, a head whose weight is the embedding's too, and what
    fully_shard manages.
    """
    linears: list[Any] = [m for m in model.modules() if isinstance(m, nn.Linear | LowBitLinear)]
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    managed = any(isinstance(m, FSDPModule) for m in model.modules())
    packed: list[tuple[nn.Linear, Tensor]] = []
    try:
        for linear in linears:
            weight_OI = _pack(linear)
            linear.forward = _forward(weight_OI, linear.bias)
            if weight_OI.is_mkldnn and type(linear) is nn.Linear and uses[id(linear.weight)] == 1 and not managed:
                packed.append((linear, weight_OI))
                linear.weight.data = linear.weight.new_empty(0)
        yield
    finally:
        for linear in linears:
            linear.__dict__.pop("forward", None)
        while packed:
            linear, weight_OI = packed.pop()
            linear.weight.data = weight_OI.to_dense()


@torch.no_grad()
def _pack(linear: Any) -> Tensor:
    weight_OI = linear.rounded() if isinstance(linear, LowBitLinear) else linear.weight.detach()
    can_pack = (
        weight_OI.device.type == "cpu" and weight_OI.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    )
    if not can_pack:
        return weight_OI
    return torch.ops.mkldnn._reorder_linear_weight(weight_OI, ROWS)


def _forward(weight_OI: Tensor, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    if not weight_OI.is_mkldnn:
        return lambda x: nn.functional.linear(x, weight_OI, bias_O)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda x: multiply(x, weight_OI, bias_O, "none", [], "")
