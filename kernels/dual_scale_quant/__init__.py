"""Dual-scale fake quantisation of activations, with straight-through gradients.

Forward: every value goes to the nearest point of two grids (see reference.py). Backward: the gradient passes to x
unchanged, since the outlier grid reaches the token's largest value and nothing is clipped away; the main scale gets
the gradient of learned step sizes (LSQ, arXiv 1902.08153, eq. 3): code − x / scale for values inside the main grid, ±
the largest code for those at its end or beyond, 0 for values on the outlier grid.
"""

from __future__ import annotations

import torch

from .reference import DualScale, dequantize, largest_code, outlier_scale, quantize

__all__ = ["dequantize", "dual_scale_quant", "largest_code", "outlier_scale", "quantize"]


def dual_scale_quant(x: torch.Tensor, main_scale: torch.Tensor, bits: int) -> torch.Tensor:
    """x [..., D] rounded to the two grids of each token; main_scale [..., 1] > 0, its leading dimensions those of x or
    expanding to them. Same shape and dtype as x. ValueError if the scales do not fit or `bits` is not 2 to 8.

    The device of x decides what runs: the Triton kernel on a GPU, the reference elsewhere.
    """
    if not 2 <= bits <= 8:
        raise ValueError(f"bits {bits}: a code of 2 to 8 bits fits int8")
    if main_scale.shape[-1:] != (1,) or main_scale.ndim > x.ndim:
        raise ValueError(f"main_scale {tuple(main_scale.shape)}: one scale per token of x {tuple(x.shape)} is needed")
    main_scale = main_scale.expand(*x.shape[:-1], 1)
    if x.is_cuda:
        from .kernel import DualScaleKernel  # Triton is only there where a GPU is

        return DualScaleKernel.apply(x, main_scale, bits)
    return DualScale.apply(x, main_scale, bits)
