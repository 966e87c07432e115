"""The parts of the loss that a kernel makes where `kernel_head` says so: values and gradients of `chunked_loss`,
without the logits of any chunk.

Shapes: N scored tokens, D hidden, K kept tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reflux.components.algorithms.kernel_head import kernel_head
from reflux.kernels.chunked_jsd import chunked_divergence
from reflux.kernels.divergences import Mixture
from reflux.kernels.topk_kl import bucket_logits

from .scorer import Scorer


def summed_divergences(
    student: Scorer, teacher: Scorer, hidden_ND: Tensor, teacher_ND: Tensor, terms: list[tuple[float, Mixture]]
) -> Tensor | None:
    """Nats of all tokens together, each divergence by its weight; None where `chunked_loss` has to serve."""
    head, teacher_head = (kernel_head(model.head, model.vocab_size, hidden_ND.device) for model in (student, teacher))
    if head is None or teacher_head is None:
        return None
    parts = [
        weight * chunked_divergence(hidden_ND, head, teacher_ND, teacher_head, mixture).sum()
        for weight, mixture in terms
    ]
    return torch.stack(parts).sum()


def bucket_logprobs(student: Scorer, hidden_ND: Tensor, token_ids_NK: Tensor) -> Tensor | None:
    """[N, K + 1] log-probabilities of each token's own K words and of all others together; None where `chunked_loss`
    has to serve.
    """
    head = kernel_head(student.head, student.vocab_size, hidden_ND.device)
    return None if head is None else bucket_logits(hidden_ND, head, token_ids_NK).log_softmax(-1)
