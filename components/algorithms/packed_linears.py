"""Linear layers with their weights laid out for oneDNN, for forwards of few rows on a CPU.

A step of decoding multiplies every weight with a handful of rows. MKL, which torch takes for float32, packs the weights
anew in every call; packed once, they are read at the speed of memory: two to four times as fast at 8 to 32 rows
(LOG.md, 2026-11-29). Shapes: O output channels, I input channels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .low_bit import LowBitLinear

ROWS = 32
"""Rows of a product that the layout is chosen for; it serves any number."""


@contextmanager
def packed_linears(model: Any) -> Iterator[None]:
    """Within the block, the linears of a model on a CPU compute from packed copies of their weights as these are now, a
    low-bit one of its rounded weight, and give no gradient. Takes the memory of the weights once more. Weights of
    another type than float32, which torch gives to oneDNN by itself, and builds without oneDNN keep their own product.
    """
    linears = [m for m in model.modules() if isinstance(m, nn.Linear | LowBitLinear)]
    try:
        for linear in linears:
            linear.forward = _packed_forward(linear)
        yield
    finally:
        for linear in linears:
            linear.__dict__.pop("forward", None)


@torch.no_grad()
def _packed_forward(linear: Any) -> Callable[[Tensor], Tensor]:
    weight_OI = linear.rounded() if isinstance(linear, LowBitLinear) else linear.weight.detach()
    if weight_OI.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return functools.partial(nn.functional.linear, weight=weight_OI, bias=linear.bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, ROWS)
    multiply, bias = torch.ops.mkldnn._linear_pointwise, linear.bias

    def forward(x: Tensor) -> Tensor:
        return multiply(x, packed, bias, "none", [], "")

    return forward
