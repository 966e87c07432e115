"""Distillation objectives per token, in nats, on whole next-token distributions.

Every objective has one signature, so that a recipe chooses it by name and everything around it (chunking, masks, the
sparse teacher) serves all of them. A sparse teacher is K tokens and the tail's mass as one more bucket: `bucketed` of
kernels/topk_kl cuts the student's distribution into the same buckets, and the objectives apply to those as to a small
vocabulary (objectives.md, rule 6). What needs only the tokens that were written is in written_losses.py. Shapes: N
tokens, V vocabulary of the tokenizer (or K + 1 buckets), K kept tokens, U distinct drawn ones.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from reflux.kernels.divergences import FORWARD_KL, REVERSE_KL, Mixture, expected, jsd

from .lean_divergence import mixture_divergence

Objective = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(student log-probabilities [N, V], teacher's [N, V], its one parameter) -> [N] nats."""


def forward_kl(student_NV: torch.Tensor, teacher_NV: torch.Tensor, beta: float = 0.0) -> torch.Tensor:
    """KL(teacher ‖ student): cover everything the teacher may do."""
    return mixture_divergence(student_NV, teacher_NV, FORWARD_KL)


def reverse_kl(student_NV: torch.Tensor, teacher_NV: torch.Tensor, beta: float = 1.0) -> torch.Tensor:
    """KL(student ‖ teacher): do nothing that the teacher would not do."""
    return mixture_divergence(student_NV, teacher_NV, REVERSE_KL)


def beta_jsd(student_NV: torch.Tensor, teacher_NV: torch.Tensor, beta: float) -> torch.Tensor:
    """Generalised Jensen-Shannon divergence of GKD (arXiv 2306.13649, eq. 1), beta * KL(T ‖ M) + (1 − beta) * KL(S ‖
    M).

    M = beta * T + (1 − beta) * S. The ends are the limits after division by beta and by 1 − beta: forward KL at 0,
    reverse KL at 1.
    """
    return mixture_divergence(student_NV, teacher_NV, jsd(beta))


def skew_forward_kl(student_NV: torch.Tensor, teacher_NV: torch.Tensor, skew: float) -> torch.Tensor:
    """KL(T ‖ skew * T + (1 − skew) * S) of DistiLLM (arXiv 2402.03898, eq. 3): finite, and with a bounded gradient,
    where the student gives a token of the teacher no mass. At 0 the forward KL.
    """
    return mixture_divergence(student_NV, teacher_NV, _skewed_forward(skew))


def skew_reverse_kl(student_NV: torch.Tensor, teacher_NV: torch.Tensor, skew: float) -> torch.Tensor:
    """KL(S ‖ skew * S + (1 − skew) * T), its mirror image (same paper, section 3.1). At 0 the reverse KL."""
    return mixture_divergence(student_NV, teacher_NV, _skewed_reverse(skew))


def cross_entropy(student_NV: torch.Tensor, teacher_NV: torch.Tensor, _: float = 0.0) -> torch.Tensor:
    """The teacher's probabilities against the student's: the forward KL and the teacher's entropy, so with the forward
    KL's gradient and the value of a language model's loss.
    """
    return expected(teacher_NV, torch.zeros_like(student_NV), student_NV)


DISTRIBUTION_OBJECTIVES: dict[str, Objective] = {
    "beta_jsd": beta_jsd,
    "cross_entropy": cross_entropy,
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "skew_forward_kl": skew_forward_kl,
    "skew_reverse_kl": skew_reverse_kl,
}


def log_probabilities(logits_NP: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """[N, V] in fp32; rows of the embedding beyond the tokenizer's vocabulary take no part (rule 5)."""
    return logits_NP[:, :vocab_size].float().log_softmax(-1)


def sampled_forward_kl(
    student_NV: torch.Tensor, token_ids_NU: torch.Tensor, weights_NU: torch.Tensor, entropy_nats_N: torch.Tensor
) -> torch.Tensor:
    """[N] estimate of KL(teacher ‖ student) from counted draws of the teacher (arXiv 2503.16870), unbiased in value and
    gradient, and below 0 where the draws happen to suit the student.

    Weights are shares of the draws, 0 in places without a token; the entropy is the teacher's own, so that the value is
    that of `forward_kl` and not of a cross-entropy.
    """
    return sampled_cross_entropy(student_NV, token_ids_NU, weights_NU) - entropy_nats_N


def sampled_cross_entropy(
    student_NV: torch.Tensor, token_ids_NU: torch.Tensor, weights_NU: torch.Tensor
) -> torch.Tensor:
    """[N] estimate of the cross-entropy from the same draws, unbiased in value and gradient."""
    drawn_NU = student_NV.gather(-1, token_ids_NU).masked_fill(weights_NU == 0, 0.0)
    return -(weights_NU * drawn_NU).sum(-1)


def _skewed_forward(skew: float) -> Mixture:
    return Mixture(share=skew, of_teacher=1.0)


def _skewed_reverse(skew: float) -> Mixture:
    return Mixture(share=1 - skew, of_student=1.0)


MIXTURES: dict[str, Callable[[float], Mixture]] = {
    "beta_jsd": jsd,
    "forward_kl": lambda _: FORWARD_KL,
    "reverse_kl": lambda _: REVERSE_KL,
    "skew_forward_kl": _skewed_forward,
    "skew_reverse_kl": _skewed_reverse,
}
"""Those of DISTRIBUTION_OBJECTIVES that are divergences from a mixture, by their parameter: what a kernel is told."""
