"""Where a kernel can take the place of `chunked_loss`: lm_head and divergence in one, without any chunk's logits."""

from __future__ import annotations

import torch
from torch import nn

from reflux.kernels.dispatch import on_triton
from reflux.kernels.lm_head import LmHead

from .output_head import ModelHead, OutputHead


def kernel_head(head: OutputHead, vocab_size: int, device: torch.device) -> LmHead | None:
    """The head as kernels take it, not trained, as in `chunked_loss`. None where only the head itself can be asked: off
    the GPU, or for a projection that is more than one matrix in one piece (a bias, an adapter, shards).
    """
    if not on_triton(device) or not isinstance(head, ModelHead):
        return None
    projection = head.projection
    if (type(projection), type(projection.weight)) != (nn.Linear, nn.Parameter) or projection.bias is not None:
        return None
    scale, cap = head.factor / head.divisor, head.cap or 0.0
    return LmHead(weight_PD=projection.weight.detach(), vocab_size=vocab_size, scale=scale, soft_cap=cap)
