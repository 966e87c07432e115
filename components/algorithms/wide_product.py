"""The product of a few rows with a head's wide weight, by oneDNN where torch would take MKL.

In float32 on a CPU torch gives a product to MKL. For 32 rows and 49,152 words oneDNN takes three quarters of the time,
forward and backward (LOG.md, 2026-11-29); for the square weights of a layer and hundreds of rows the two are alike.
Shapes: N rows, I input channels, P rows of the head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def wide_product(x_NI: Tensor, weight_PI: Tensor) -> Tensor:
    """[N, P], as nn.functional.linear gives it, to rounding; of anything but float32 on a CPU it is that function."""
    on_cpu = x_NI.device.type == "cpu" and x_NI.dtype == weight_PI.dtype == torch.float32
    if not on_cpu or not torch.backends.mkldnn.is_available() or not len(x_NI):
        return torch.nn.functional.linear(x_NI, weight_PI)
    return _Product.apply(x_NI, weight_PI)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_PI: Tensor) -> Tensor:
        ctx.save_for_backward(x_NI, weight_PI)
        return _multiply(x_NI, weight_PI)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_PI = ctx.saved_tensors
        (grad_NP,) = grad_outputs
        of_x = _multiply(grad_NP, weight_PI.t()) if ctx.needs_input_grad[0] else None
        of_weight = _multiply(grad_NP.t(), x_NI.t()) if ctx.needs_input_grad[1] else None
        return of_x, of_weight


def _multiply(x_NI: Tensor, weight_OI: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, None, "none", [], "")
