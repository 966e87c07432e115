"""How far a student's log-probabilities are from a teacher's, per token, in nats: the definition that the fused ops are
held to and that the objectives are made of.

Every one is a weighted sum of two KL divergences from a mixture of both, so that three numbers say which one. What
stands in the last dimension may be the vocabulary or K + 1 buckets of it. Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """of_teacher * KL(T ‖ M) + of_student * KL(S ‖ M), where M = share * T + (1 − share) * S."""

    share: float
    of_teacher: float = 0.0
    of_student: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0:
            raise ValueError(f"share {self.share}: the teacher's part of the mixture is from 0 to 1")


FORWARD_KL = Mixture(share=0.0, of_teacher=1.0)
"""KL(teacher ‖ student): cover everything the teacher may do."""
REVERSE_KL = Mixture(share=1.0, of_student=1.0)
"""KL(student ‖ teacher): do nothing that the teacher would not do."""


def jsd(beta: float) -> Mixture:
    """Generalised Jensen-Shannon divergence of GKD (arXiv 2306.13649, eq. 1). The ends are the limits after division by
    beta and by 1 − beta: forward KL at 0, reverse KL at 1.
    """
    if beta in (0.0, 1.0):
        return FORWARD_KL if beta == 0.0 else REVERSE_KL
    return Mixture(share=beta, of_teacher=beta, of_student=1 - beta)


def divergence(student_NV: torch.Tensor, teacher_NV: torch.Tensor, mixture: Mixture) -> torch.Tensor:
    """[N] of log-probabilities; infinite where a KL divergence is."""
    mixture_NV = _mixed(student_NV, teacher_NV, mixture.share)
    terms = ((mixture.of_teacher, teacher_NV), (mixture.of_student, student_NV))
    parts = [weight * expected(of_NV, of_NV, mixture_NV) for weight, of_NV in terms if weight]
    return torch.stack(parts).sum(0)


def expected(weights_NV: torch.Tensor, left_NV: torch.Tensor, right_NV: torch.Tensor) -> torch.Tensor:
    """[N] sum of exp(weights) * (left − right); a bucket of probability zero adds nothing, whatever stands in it."""
    probability_NV = weights_NV.exp()
    difference_NV = (left_NV - right_NV).masked_fill(probability_NV == 0, 0.0)
    return (probability_NV * difference_NV).sum(-1)


def _mixed(student_NV: torch.Tensor, teacher_NV: torch.Tensor, share: float) -> torch.Tensor:
    if share in (0.0, 1.0):
        return student_NV if share == 0.0 else teacher_NV
    possible_NV = teacher_NV.clamp(min=torch.finfo(teacher_NV.dtype).min)  # logaddexp(-inf, -inf) has a NaN gradient
    return torch.logaddexp(possible_NV + math.log(share), student_NV + math.log1p(-share))
