"""The closed-form gradient against autograd through the formula, in double precision."""

from __future__ import annotations

import math

import pytest
import torch

from reflux.components.algorithms.lean_divergence import mixture_divergence
from reflux.kernels.divergences import Mixture, jsd

CASES = pytest.mark.parametrize(
    ("share", "of_teacher", "of_student"),
    [(0.0, 1.0, 0.0), (1.0, 0.0, 1.0), (0.3, 0.3, 0.7), (0.1, 1.0, 0.0), (0.9, 0.0, 1.0), (0.4, 2.0, 0.5)],
)


def formula(
    student_NV: torch.Tensor, teacher_NV: torch.Tensor, share: float, of_teacher: float, of_student: float
) -> torch.Tensor:
    if 0 < share < 1:
        mixture_NV = torch.logaddexp(teacher_NV + math.log(share), student_NV + math.log1p(-share))
    else:
        mixture_NV = teacher_NV if share else student_NV
    kl_teacher_N = (teacher_NV.exp() * (teacher_NV - mixture_NV)).sum(-1)
    kl_student_N = (student_NV.exp() * (student_NV - mixture_NV)).sum(-1)
    return of_teacher * kl_teacher_N + of_student * kl_student_N


@CASES
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (3, 700)])
def test_value_and_gradient_are_those_of_the_formula(
    share: float, of_teacher: float, of_student: float, shape: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(shape, dtype=torch.float64, generator=generator).mul_(4).requires_grad_()
    teacher_NV = torch.randn(shape, dtype=torch.float64, generator=generator).mul_(4).log_softmax(-1)
    student_NV = logits_NV.log_softmax(-1)
    mixture = Mixture(share=share, of_teacher=of_teacher, of_student=of_student)
    found_N = mixture_divergence(student_NV, teacher_NV, mixture)
    expected_N = formula(student_NV, teacher_NV, share, of_teacher, of_student)
    torch.testing.assert_close(found_N, expected_N, rtol=1e-9, atol=1e-12)
    weight_N = torch.rand(shape[0], dtype=torch.float64, generator=generator)
    for of in (logits_NV, student_NV):  # through the softmax, and of log-probabilities that are free
        found, expected = (
            torch.autograd.grad((weight_N * value_N).sum(), of, retain_graph=True)[0]
            for value_N in (found_N, expected_N)
        )
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12)


@CASES
def test_what_is_impossible_for_both_adds_nothing(share: float, of_teacher: float, of_student: float) -> None:
    student_NV = torch.tensor([[0.0, -1.0, -torch.inf, -300.0]], requires_grad=True)
    teacher_NV = torch.tensor([[-0.5, -1.0, -torch.inf, -310.0]])
    mixture = Mixture(share=share, of_teacher=of_teacher, of_student=of_student)
    found_N = mixture_divergence(student_NV, teacher_NV, mixture)
    torch.testing.assert_close(found_N, mixture_divergence(student_NV[:, :2], teacher_NV[:, :2], mixture))
    found_N.sum().backward()
    assert student_NV.grad.isfinite().all()
    assert student_NV.grad[0, 2:].tolist() == [0.0, 0.0]


def test_nothing_is_kept_where_no_gradient_is_asked() -> None:
    student_NV = torch.zeros(2, 3).log_softmax(-1)
    found_N = mixture_divergence(student_NV, student_NV, jsd(0.5))
    assert found_N.grad_fn is None
    assert found_N.tolist() == [0.0, 0.0]
