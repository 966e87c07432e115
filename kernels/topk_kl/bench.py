"""What is timed: the forward KL of a student from a stored top-k teacher, forward and backward to the hidden states.

The baseline makes all logits. Liger has no counterpart: its losses need the teacher's whole distribution.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from reflux.kernels.bench import Case, Provider, Providers, Tensors
from reflux.kernels.dispatch import INTERPRETED, on_triton
from reflux.kernels.divergences import FORWARD_KL, divergence
from reflux.kernels.lm_head import LmHead

from .reference import bucketed

RTOL, ATOL = 2e-2, 1e-3  # the gradient in bfloat16; in float32 the tests ask for 1e-5
SIZES = (
    (2048, 576, 49_152, 32),
    (8192, 4096, 128_256, 64),
)  # tokens, hidden, vocabulary, kept: SmolLM2-135M, Llama-3-8B


def providers(device: torch.device) -> Providers:
    """Forward and backward of each implementation that runs on the device."""
    found: Providers = {"reference": _provider(_reference), "liger": "its losses need the teacher's whole distribution"}
    if on_triton(device):
        from .kernel import BucketLogits

        found["kernel"] = _provider(lambda h, head, ids: BucketLogits.apply(h, head.weight_PD, head, ids))
    else:
        found["kernel"] = "it needs a GPU, or TRITON_INTERPRET=1 for its memory alone"
    return found


def cases(device: torch.device) -> list[Case]:
    """SIZES in bfloat16; on a CPU the first in float32 with a sixteenth of the tokens, and 16 wide for the interpreter,
    which does not change what is measured there.
    """
    if device.type == "cuda":
        return [_case(*size, device, torch.bfloat16) for size in SIZES]
    tokens, width, vocab, kept = SIZES[0]
    return [_case(tokens // 16, 16 if INTERPRETED else width, vocab, kept, device, torch.float32)]


def _case(tokens: int, width: int, vocab: int, kept: int, device: torch.device, dtype: torch.dtype) -> Case:
    generator = torch.Generator(device).manual_seed(0)
    hidden_ND = torch.randn(tokens, width, generator=generator, device=device)
    weight_VD = torch.randn(vocab, width, generator=generator, device=device) / width**0.5
    ids_NK = torch.rand(tokens, vocab, generator=generator, device=device).topk(kept).indices
    teacher_NB = torch.randn(tokens, kept + 1, generator=generator, device=device).log_softmax(-1)
    read_twice = (hidden_ND.numel() + weight_VD.numel()) * dtype.itemsize
    return Case(
        name=f"{tokens} x {width} x {vocab} k {kept} {str(dtype).removeprefix('torch.')}",
        inputs=(hidden_ND.to(dtype), weight_VD.to(dtype), ids_NK, teacher_NB),
        bytes_moved=2 * read_twice + hidden_ND.numel() * dtype.itemsize,
    )


def _reference(hidden_ND: torch.Tensor, head: LmHead, ids_NK: torch.Tensor) -> torch.Tensor:
    return bucketed(head.logits(hidden_ND), ids_NK)


def _provider(bucket_logits: Callable[..., torch.Tensor]) -> Provider:
    def run(
        hidden_ND: torch.Tensor, weight_VD: torch.Tensor, ids_NK: torch.Tensor, teacher_NB: torch.Tensor
    ) -> Tensors:
        hidden_ND, head = hidden_ND.detach().requires_grad_(), LmHead(weight_PD=weight_VD, vocab_size=len(weight_VD))
        loss_N = divergence(bucket_logits(hidden_ND, head, ids_NK).log_softmax(-1), teacher_NB, FORWARD_KL)
        return loss_N.detach(), *torch.autograd.grad(loss_N.sum(), hidden_ND)

    return run
