"""A student's and a teacher's lm_head and the divergence of their whole distributions in one.

Both heads are streamed over the vocabulary together: once for the two logsumexps, once for the value, and in backward
once for the gradient. The value's pass cannot be the gradient's: with s and t the log-probabilities, m that of the
mixture M = a T + (1 − a) S, and w_T, w_S the weights of the two KL divergences,

    φ_v = −w_T (1 − a) exp(t_v − m_v) + w_S [s_v − m_v − (1 − a) exp(s_v − m_v)]
    ∂f/∂z_v = exp(s_v) (φ_v − r),    r = Σ_u exp(s_u) φ_u

and r is known only after all words. At a = 0 this is exp(s) − exp(t); for the JSD (w_T = a, w_S = 1 − a) the two
exponentials of φ add up to a constant, and exp(s) (1 − a) (s − m − KL(S ‖ M)) is left.

Shapes: N tokens, D hidden of either model, V vocabulary of the one tokenizer of both.
"""

from __future__ import annotations

import torch

from reflux.kernels.dispatch import on_triton
from reflux.kernels.divergences import Mixture, jsd
from reflux.kernels.lm_head import LmHead

from .reference import dense_divergence

__all__ = ["chunked_divergence", "chunked_jsd"]


def chunked_jsd(
    hidden_ND: torch.Tensor, head: LmHead, teacher_ND: torch.Tensor, teacher_head: LmHead, *, beta: float
) -> torch.Tensor:
    """[N] nats: `divergences.jsd` of student and teacher; 0 is KL(teacher ‖ student), 1 is KL(student ‖ teacher)."""
    return chunked_divergence(hidden_ND, head, teacher_ND, teacher_head, jsd(beta))


def chunked_divergence(
    hidden_ND: torch.Tensor, head: LmHead, teacher_ND: torch.Tensor, teacher_head: LmHead, mixture: Mixture
) -> torch.Tensor:
    """[N] float32 nats, differentiable in the student's hidden states and its head's weight, never in the teacher's.

    The two models may differ in width, padding and dtype; ValueError if they do not have one vocabulary, the same
    tokens and one device. That device decides what runs: on a GPU the Triton kernel, which never holds [N, V];
    elsewhere the reference, which does, so that a caller with many tokens gives it a few at a time.
    """
    head.require_fitting(hidden_ND)
    teacher_head.require_fitting(teacher_ND)
    if head.vocab_size != teacher_head.vocab_size:
        raise ValueError(f"vocab_size {head.vocab_size} of the student: the teacher's is {teacher_head.vocab_size}")
    if len(hidden_ND) != len(teacher_ND) or hidden_ND.device != teacher_ND.device:
        found = f"{len(teacher_ND)} tokens on {teacher_ND.device}"
        raise ValueError(f"teacher_ND, {found}: the student has {len(hidden_ND)} on {hidden_ND.device}")
    if on_triton(hidden_ND.device):
        from .kernel import ChunkedDivergence  # Triton is only there where a GPU is

        return ChunkedDivergence.apply(hidden_ND, head.weight_PD, head, teacher_ND, teacher_head, mixture)
    return dense_divergence(hidden_ND, head, teacher_ND, teacher_head, mixture)
