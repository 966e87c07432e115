"""Two heads and their divergence against numpy in double precision, term by term, its gradient, its limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from mixtures import EVERY

from reflux.kernels.chunked_jsd import chunked_divergence, chunked_jsd
from reflux.kernels.divergences import Mixture, divergence
from reflux.kernels.lm_head import LmHead

V = 19


def models(tokens: int, dtype: torch.dtype = torch.float64, **transform: float) -> tuple:
    """Student and teacher of different width and padding: hidden states and head of each."""
    generator = torch.Generator().manual_seed(tokens)
    found: list = []
    for width, rows in ((5, 19), (8, 24)):
        hidden_ND = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
        weight_PD = torch.randn(rows, width, generator=generator, dtype=torch.float64)
        found += [hidden_ND.to(dtype), LmHead(weight_PD=weight_PD.to(dtype), vocab_size=V, **transform)]
    return tuple(found)


def chances(hidden_D: torch.Tensor, head: LmHead) -> np.ndarray:
    logits_V = head.weight_PD.numpy()[:V] @ hidden_D.numpy() * head.scale
    if head.soft_cap:
        logits_V = head.soft_cap * np.tanh(logits_V / head.soft_cap)
    return np.exp(logits_V) / np.exp(logits_V).sum()


@EVERY
@pytest.mark.parametrize("transform", [{}, {"scale": 0.4}, {"scale": 1.5, "soft_cap": 2.0}], ids=str)
def test_equals_numpy(transform: dict[str, float], mixture: Mixture):
    hidden_ND, head, teacher_ND, teacher_head = models(4, **transform)
    found_N = chunked_divergence(hidden_ND, head, teacher_ND, teacher_head, mixture)
    for n in range(4):
        student_V, teacher_V = chances(hidden_ND[n], head), chances(teacher_ND[n], teacher_head)
        mixture_V = mixture.share * teacher_V + (1 - mixture.share) * student_V
        wanted = mixture.of_teacher * (teacher_V * np.log(teacher_V / mixture_V)).sum()
        wanted += mixture.of_student * (student_V * np.log(student_V / mixture_V)).sum()
        assert found_N[n].item() == pytest.approx(wanted, rel=1e-11)


@EVERY
def test_gradients_by_finite_differences(mixture: Mixture):
    hidden_ND, head, teacher_ND, teacher_head = models(2)

    def loss(hidden_ND: torch.Tensor, weight_PD: torch.Tensor) -> torch.Tensor:
        moved = LmHead(weight_PD=weight_PD, vocab_size=V, scale=0.6, soft_cap=4.0)
        return chunked_divergence(hidden_ND, moved, teacher_ND, teacher_head, mixture)

    assert torch.autograd.gradcheck(loss, (hidden_ND.requires_grad_(), head.weight_PD.requires_grad_()))


@EVERY
def test_gradient_of_the_logits_is_the_stated_one(mixture: Mixture):
    generator = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(3, V, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher_NV = (2 * torch.randn(3, V, generator=generator, dtype=torch.float64)).log_softmax(-1)
    (found_NV,) = torch.autograd.grad(divergence(logits_NV.log_softmax(-1), teacher_NV, mixture).sum(), logits_NV)
    student_NV, a = logits_NV.detach().log_softmax(-1), mixture.share
    mixed_NV = (a * teacher_NV.exp() + (1 - a) * student_NV.exp()).log()
    gap_NV = student_NV - mixed_NV
    phi_NV = mixture.of_student * (gap_NV - (1 - a) * gap_NV.exp())
    phi_NV -= mixture.of_teacher * (1 - a) * (teacher_NV - mixed_NV).exp()
    mean_N1 = (student_NV.exp() * phi_NV).sum(-1, keepdim=True)
    torch.testing.assert_close(found_NV, student_NV.exp() * (phi_NV - mean_N1))


def test_the_ends_of_beta_are_the_scaled_limits():
    hidden_ND, head, teacher_ND, teacher_head = models(30)
    arguments, small = (0.2 * hidden_ND, head, 0.2 * teacher_ND, teacher_head), 1e-7
    for end, near in ((0.0, small), (1.0, 1 - small)):
        near_N, end_N = chunked_jsd(*arguments, beta=near) / small, chunked_jsd(*arguments, beta=end)
        torch.testing.assert_close(near_N, end_N, rtol=1e-3, atol=1e-6)


@EVERY
def test_is_zero_with_itself_and_bounded_by_the_coin_that_picks_the_side(mixture: Mixture):
    hidden_ND, head, teacher_ND, teacher_head = models(20)
    assert chunked_divergence(hidden_ND, head, hidden_ND, head, mixture).abs().max() < 1e-12
    far_N = chunked_divergence(30 * hidden_ND, head, 30 * teacher_ND, teacher_head, mixture)
    assert (far_N > 0).all()
    if mixture.of_teacher and mixture.of_student:
        assert (far_N <= -sum(w * math.log(w) for w in (mixture.share, 1 - mixture.share)) + 1e-12).all()


def test_the_teacher_is_frozen():
    hidden_ND, head, teacher_ND, teacher_head = models(3, torch.float32)
    for tensor in (hidden_ND, teacher_ND, head.weight_PD, teacher_head.weight_PD):
        tensor.requires_grad_()
    chunked_jsd(hidden_ND, head, teacher_ND, teacher_head, beta=0.5).sum().backward()
    assert hidden_ND.grad is not None
    assert head.weight_PD.grad is not None
    assert teacher_ND.grad is None
    assert teacher_head.weight_PD.grad is None


def test_tokens_that_count_nothing_have_no_gradient():
    hidden_ND, head, teacher_ND, teacher_head = models(3, torch.float32)
    hidden_ND.requires_grad_()
    (chunked_jsd(hidden_ND, head, 1e4 * teacher_ND, teacher_head, beta=0.5) * torch.zeros(3)).sum().backward()
    assert (hidden_ND.grad == 0).all()
    assert chunked_jsd(hidden_ND[:0], head, teacher_ND[:0], teacher_head, beta=0.5).shape == (0,)


def test_what_does_not_fit_is_refused():
    hidden_ND, head, teacher_ND, teacher_head = models(3, torch.float32)
    smaller = LmHead(weight_PD=teacher_head.weight_PD, vocab_size=V - 1)
    with pytest.raises(ValueError, match=f"vocab_size {V} of the student: the teacher's is {V - 1}"):
        chunked_jsd(hidden_ND, head, teacher_ND, smaller, beta=0.5)
    with pytest.raises(ValueError, match="teacher_ND, 2 tokens"):
        chunked_jsd(hidden_ND, head, teacher_ND[:2], teacher_head, beta=0.5)
    with pytest.raises(ValueError, match="hidden_ND"):
        chunked_jsd(hidden_ND, teacher_head, teacher_ND, teacher_head, beta=0.5)
    with pytest.raises(ValueError, match=r"share -0\.5"):
        chunked_jsd(hidden_ND, head, teacher_ND, teacher_head, beta=-0.5)
