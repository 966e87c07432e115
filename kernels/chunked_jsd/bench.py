"""What is timed: the beta-JSD of a student and a teacher with heads of their own, forward and backward to the student's
hidden states and weight, which is what Liger's chunked loss always computes.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

from reflux.kernels.bench import Case, Provider, Providers, Tensors
from reflux.kernels.dispatch import INTERPRETED, on_triton
from reflux.kernels.divergences import jsd
from reflux.kernels.lm_head import LmHead

from .reference import dense_divergence

RTOL, ATOL = 2e-2, 1e-3  # gradients in bfloat16; in float32 the tests ask for 1e-5
BETA = 0.5
SIZES = ((2048, 576, 960, 49_152), (8192, 4096, 4096, 128_256))  # tokens, both hidden, vocabulary: SmolLM2, Llama-3-8B


def providers(device: torch.device) -> Providers:
    """Forward and backward of each implementation that runs on the device."""
    found: Providers = {"reference": _provider(_reference)}
    if on_triton(device):
        from .kernel import ChunkedDivergence

        found["kernel"] = _provider(
            lambda h, w, t, tw: ChunkedDivergence.apply(h, w, _head(w), t, _head(tw), jsd(BETA)).sum()
        )
    else:
        found["kernel"] = "it needs a GPU, or TRITON_INTERPRET=1 for its memory alone"
    installed = find_spec("liger_kernel") is not None
    found["liger"] = _provider(_liger(device)) if installed else "liger-kernel is not installed"
    return found


def cases(device: torch.device) -> list[Case]:
    """SIZES in bfloat16; on a CPU the first in float32 with a sixteenth of the tokens, and 16 wide for the interpreter,
    which does not change what is measured there.
    """
    if device.type == "cuda":
        return [_case(*size, device, torch.bfloat16) for size in SIZES]
    tokens, width, teacher_width, vocab = SIZES[0]
    widths = (16, 16) if INTERPRETED else (width, teacher_width)
    return [_case(tokens // 16, *widths, vocab, device, torch.float32)]


def _case(tokens: int, width: int, teacher_width: int, vocab: int, device: torch.device, dtype: torch.dtype) -> Case:
    generator = torch.Generator(device).manual_seed(0)
    made = []
    for d in (width, teacher_width):
        made.append(torch.randn(tokens, d, generator=generator, device=device).to(dtype))
        made.append((torch.randn(vocab, d, generator=generator, device=device) / d**0.5).to(dtype))
    hidden_ND, weight_VD = made[:2]
    return Case(
        name=f"{tokens} x {width}, {teacher_width} x {vocab} {str(dtype).removeprefix('torch.')}",
        inputs=tuple(made),
        bytes_moved=(3 * sum(t.numel() for t in made) + hidden_ND.numel() + weight_VD.numel()) * dtype.itemsize,
    )


def _head(weight_VD: torch.Tensor) -> LmHead:
    return LmHead(weight_PD=weight_VD, vocab_size=len(weight_VD))


def _reference(
    hidden_ND: torch.Tensor, weight_VD: torch.Tensor, teacher_ND: torch.Tensor, teacher_weight_VD: torch.Tensor
) -> torch.Tensor:
    return dense_divergence(hidden_ND, _head(weight_VD), teacher_ND, _head(teacher_weight_VD), jsd(BETA)).sum()


def _liger(device: torch.device) -> Callable[..., torch.Tensor]:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(
        beta=BETA, weight_hard_loss=0.0, weight_soft_loss=1.0, compiled=device.type == "cuda"
    )

    def run(
        hidden_ND: torch.Tensor, weight_VD: torch.Tensor, teacher_ND: torch.Tensor, teacher_weight_VD: torch.Tensor
    ) -> torch.Tensor:
        labels_N = torch.zeros(len(hidden_ND), dtype=torch.int64, device=device)
        return loss(hidden_ND, weight_VD, teacher_ND, teacher_weight_VD, labels_N) * len(hidden_ND)  # a mean there

    return run


def _provider(total: Callable[..., torch.Tensor]) -> Provider:
    def run(
        hidden_ND: torch.Tensor, weight_VD: torch.Tensor, teacher_ND: torch.Tensor, teacher_weight_VD: torch.Tensor
    ) -> Tensors:
        hidden_ND, weight_VD = hidden_ND.detach().requires_grad_(), weight_VD.detach().requires_grad_()
        loss = total(hidden_ND, weight_VD, teacher_ND, teacher_weight_VD)
        return loss.detach(), *torch.autograd.grad(loss, (hidden_ND, weight_VD))

    return run
