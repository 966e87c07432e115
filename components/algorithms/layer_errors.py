"""Where a student's quantisation error is: per decoder layer and token, against the same layers of its teacher.

Errors grow with depth and with the length of an answer, so a loss over all places mostly sees those that are nearly
right. `bridge` is taken at the worst places of each sequence alone, so its gradient is not diluted, and so it is the
same however sequences are dealt to micro-batches and processes (objectives.md, rule 1).

Shapes: B sequences, T tokens, D hidden; L layers, N tokens of S sequences, one sequence after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .low_bit import decoder_layers

TINY = 1e-12
"""Of squared norms: a layer that puts out zeros is no division by zero."""


@contextmanager
def watching_layers(model: Any, see: Callable[[Tensor], None]) -> Iterator[None]:
    """Within the block, `see(h_BTD)` is called with the output of every decoder layer, the first one first.

    `output_hidden_states` would give the last layer's after the final norm.
    """

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        see(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_hook(hook) for layer in decoder_layers(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def squared_errors(student_LND: Sequence[Tensor], teacher_LND: Sequence[Tensor]) -> Tensor:
    """[L, N] |h_S − h_T|² / |h_T|² of each layer's output, differentiable in the student's; float32."""
    return torch.stack([
        (student_ND.float() - teacher_ND.float()).square().sum(-1) / teacher_ND.float().square().sum(-1).clamp(min=TINY)
        for student_ND, teacher_ND in zip(student_LND, teacher_LND, strict=True)
    ])  # fmt: skip


def bridge(error_LN: Tensor, lengths_S: Sequence[int], fraction: float) -> Tensor:
    """[N] whose sum over a sequence of T tokens is T times the mean of `error_LN` over the `fraction` of its L T places
    (layer, token) where it is largest, at least one: over many sequences, divided by their tokens, the mean error of
    the worst places. With a fraction of 1 it is the mean over all layers.

    Which places count is decided without a gradient. ValueError for a fraction outside (0, 1].
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"bridge_fraction {fraction}: must be in (0, 1]")
    assert sum(lengths_S) == error_LN.shape[1]
    parts = []
    for error_LT in error_LN.split([*lengths_S], dim=1):
        places = max(1, math.ceil(fraction * error_LT.numel() - 1e-9)) if error_LT.numel() else 0
        worst = error_LT.detach().flatten().topk(places).indices
        chosen_LT = torch.zeros_like(error_LT).flatten().index_fill(0, worst, 1.0).view_as(error_LT)
        parts.append((chosen_LT * error_LT).sum(0) * (error_LT.shape[1] / max(1, places)))
    return torch.cat(parts) if parts else error_LN.new_zeros(0)


def activation_kl(student_LND: Sequence[Tensor], teacher_LND: Sequence[Tensor]) -> Tensor:
    """[N] KL(teacher ‖ student) in nats between the layers' normalised outputs h / rms(h), each read as a distribution
    over its channels by softmax; mean over layers.

    That is what a norm hands on, without its learned gains: one number that says whether activations still come nearer
    while nothing but scales is trained.
    """
    parts = []
    for student_ND, teacher_ND in zip(student_LND, teacher_LND, strict=True):
        student_ND, teacher_ND = _channels(student_ND), _channels(teacher_ND)
        parts.append((teacher_ND.exp() * (teacher_ND - student_ND)).sum(-1))
    return torch.stack(parts).mean(0)


def _channels(hidden_ND: Tensor) -> Tensor:
    """[N, D] log-probabilities; no channel is beyond sqrt(D), so none is infinitely unlikely."""
    hidden_ND = hidden_ND.float()
    return (hidden_ND / hidden_ND.square().mean(-1, keepdim=True).clamp(min=TINY).sqrt()).log_softmax(-1)
