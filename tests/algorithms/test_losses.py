"""Every objective against a loop in double precision, its limits, and the places where arithmetic breaks first."""

from __future__ import annotations

import math

import pytest
import torch

from reflux.components.algorithms.losses import (
    DISTRIBUTION_OBJECTIVES,
    beta_jsd,
    cross_entropy,
    forward_kl,
    log_probabilities,
    reverse_kl,
    skew_forward_kl,
    skew_reverse_kl,
)
from reflux.kernels.topk_kl import bucketed

EVERY = pytest.mark.parametrize("name", sorted(DISTRIBUTION_OBJECTIVES))
BETAS = pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9])
DIVERGENCES = pytest.mark.parametrize("name", sorted(DISTRIBUTION_OBJECTIVES.keys() - {"cross_entropy"}))


def log_probs(rows: int, columns: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(rows, columns, generator=generator)).log_softmax(-1)


def literal(name: str, student: list[float], teacher: list[float], parameter: float) -> float:
    """One token's objective in nats, from probabilities, term by term."""

    def kl(left: list[float], right: list[float]) -> float:
        return sum(a * math.log(a / b) for a, b in zip(left, right, strict=True) if a > 0)

    def mixed(share: float) -> list[float]:
        return [share * t + (1 - share) * s for s, t in zip(student, teacher, strict=True)]

    def jsd() -> float:
        if parameter in (0, 1):
            return kl(student, teacher) if parameter else kl(teacher, student)
        return parameter * kl(teacher, mixed(parameter)) + (1 - parameter) * kl(student, mixed(parameter))

    return {
        "beta_jsd": jsd,
        "cross_entropy": lambda: -sum(t * math.log(s) for s, t in zip(student, teacher, strict=True)),
        "forward_kl": lambda: kl(teacher, student),
        "reverse_kl": lambda: kl(student, teacher),
        "skew_forward_kl": lambda: kl(teacher, mixed(parameter)),
        "skew_reverse_kl": lambda: kl(student, mixed(1 - parameter)),
    }[name]()


@EVERY
@BETAS
def test_equals_a_literal_loop(name: str, beta: float):
    student_NV, teacher_NV = log_probs(6, 17, 0), log_probs(6, 17, 1)
    found_N = DISTRIBUTION_OBJECTIVES[name](student_NV, teacher_NV, beta)
    for n in range(6):
        expected = literal(name, student_NV[n].double().exp().tolist(), teacher_NV[n].double().exp().tolist(), beta)
        assert found_N[n].item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


@DIVERGENCES
@BETAS
def test_is_zero_between_equals_and_never_negative(name: str, beta: float):
    student_NV, teacher_NV = log_probs(300, 40, 2, spread=8), log_probs(300, 40, 3, spread=8)
    objective = DISTRIBUTION_OBJECTIVES[name]
    assert objective(student_NV, student_NV, beta).abs().max() < 1e-6
    assert objective(student_NV, teacher_NV, beta).min() >= 0
    nearly_NV = (student_NV + 1e-4 * torch.randn(300, 40)).log_softmax(-1)
    assert objective(student_NV, nearly_NV, beta).min() > -1e-6  # rounding of 40 terms


@EVERY
@BETAS
def test_gradient_is_finite_and_vanishes_between_equals(name: str, beta: float):
    logits_NV = (8 * torch.randn(5, 30, generator=torch.Generator().manual_seed(4))).requires_grad_()
    own_NV = logits_NV.detach().log_softmax(-1)
    for teacher_NV, vanishes in ((own_NV, True), (log_probs(5, 30, 5, spread=8), False)):
        (gradient_NV,) = torch.autograd.grad(
            DISTRIBUTION_OBJECTIVES[name](logits_NV.log_softmax(-1), teacher_NV, beta).sum(), logits_NV
        )
        assert gradient_NV.isfinite().all()
        assert (gradient_NV.abs().max() < 1e-5) == vanishes


@EVERY
def test_gradient_by_finite_differences(name: str):
    logits_NV = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(6), requires_grad=True)
    teacher_NV = log_probs(2, 5, 7).double()
    assert torch.autograd.gradcheck(
        lambda x: DISTRIBUTION_OBJECTIVES[name](x.log_softmax(-1), teacher_NV, 0.3), logits_NV
    )


def test_the_ends_of_beta_are_the_scaled_limits():
    student_NV, teacher_NV = (log_probs(50, 20, seed, spread=1).double() for seed in (8, 9))
    small = 1e-6
    torch.testing.assert_close(
        beta_jsd(student_NV, teacher_NV, small) / small, forward_kl(student_NV, teacher_NV), rtol=1e-3, atol=1e-6
    )
    torch.testing.assert_close(
        beta_jsd(student_NV, teacher_NV, 1 - small) / small, reverse_kl(student_NV, teacher_NV), rtol=1e-3, atol=1e-6
    )
    assert torch.equal(beta_jsd(student_NV, teacher_NV, 0.0), forward_kl(student_NV, teacher_NV))
    assert torch.equal(beta_jsd(student_NV, teacher_NV, 1.0), reverse_kl(student_NV, teacher_NV))


@EVERY
@BETAS
def test_tokens_impossible_for_both_add_nothing(name: str, beta: float):
    logits_NV = torch.randn(4, 6, generator=torch.Generator().manual_seed(10), requires_grad=True)
    teacher_NV = log_probs(4, 6, 11)
    nowhere_N2 = torch.full((4, 2), -torch.inf)
    wide = DISTRIBUTION_OBJECTIVES[name](
        torch.cat([logits_NV, nowhere_N2], -1).log_softmax(-1), torch.cat([teacher_NV, nowhere_N2], -1), beta
    )
    narrow = DISTRIBUTION_OBJECTIVES[name](logits_NV.log_softmax(-1), teacher_NV, beta)
    torch.testing.assert_close(wide, narrow)
    (wide_NV,), (narrow_NV,) = (torch.autograd.grad(v.sum(), logits_NV, retain_graph=True) for v in (wide, narrow))
    torch.testing.assert_close(wide_NV, narrow_NV)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_jsd_stays_finite_on_disjoint_supports(beta: float):
    student_NV = torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]], requires_grad=True)
    teacher_NV = torch.tensor([[-torch.inf, 0.0], [-torch.inf, 0.0]])
    found_N = beta_jsd(student_NV, teacher_NV, beta)
    bound = -beta * math.log(beta) - (1 - beta) * math.log1p(-beta)  # entropy of the coin that picks the side
    torch.testing.assert_close(found_N, torch.tensor([bound, 0.0]))
    assert torch.autograd.grad(found_N.sum(), student_NV)[0].isfinite().all()


def test_skewed_divergences_stay_finite_on_disjoint_supports():
    student_NV = torch.tensor([[0.0, -torch.inf]], requires_grad=True)
    teacher_NV = torch.tensor([[-torch.inf, 0.0]])
    for objective in (skew_forward_kl, skew_reverse_kl):
        found_N = objective(student_NV, teacher_NV, 0.1)
        torch.testing.assert_close(found_N, torch.tensor([-math.log(0.1)]))
        assert torch.autograd.grad(found_N.sum(), student_NV)[0].isfinite().all()


def test_without_skew_they_are_the_plain_divergences():
    student_NV, teacher_NV = log_probs(9, 12, 30), log_probs(9, 12, 31)
    assert torch.equal(skew_forward_kl(student_NV, teacher_NV, 0.0), forward_kl(student_NV, teacher_NV))
    assert torch.equal(skew_reverse_kl(student_NV, teacher_NV, 0.0), reverse_kl(student_NV, teacher_NV))


def test_cross_entropy_is_the_forward_kl_and_the_teachers_entropy():
    logits_NV = torch.randn(9, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(32), requires_grad=True)
    teacher_NV = log_probs(9, 12, 33).double()
    student_NV = logits_NV.log_softmax(-1)
    values = cross_entropy(student_NV, teacher_NV), forward_kl(student_NV, teacher_NV)
    torch.testing.assert_close(values[0] - values[1], torch.special.entr(teacher_NV.exp()).sum(-1))
    gradients = [torch.autograd.grad(value_N.sum(), logits_NV, retain_graph=True)[0] for value_N in values]
    torch.testing.assert_close(*gradients)


def test_a_support_that_is_not_covered_costs_infinitely_much():
    certain, spread = torch.tensor([[0.0, -torch.inf]]), torch.tensor([[0.5, 0.5]]).log()
    assert forward_kl(certain, spread).item() == math.inf
    assert reverse_kl(spread, certain).item() == math.inf
    assert reverse_kl(certain, spread).item() == pytest.approx(math.log(2))


@EVERY
@BETAS
def test_finite_where_probabilities_underflow_in_bfloat16(name: str, beta: float):
    gap = torch.tensor([[0.0, -300.0, -1e4], [0.0, -1e4, -300.0]], dtype=torch.bfloat16)
    student_logits = gap.clone().requires_grad_()
    found_N = DISTRIBUTION_OBJECTIVES[name](
        log_probabilities(student_logits, 3), log_probabilities(gap.flip(0), 3), beta
    )
    assert found_N.dtype == torch.float32
    assert found_N.isfinite().all()
    assert torch.autograd.grad(found_N.sum(), student_logits)[0].isfinite().all()


def test_a_probability_that_underflows_against_an_impossible_token_is_not_nan():
    # exp(-200) is 0 in float32, and 0 * inf is NaN
    assert forward_kl(torch.tensor([[0.0, -torch.inf]]), torch.tensor([[0.0, -200.0]])).item() == 0.0
    assert reverse_kl(torch.tensor([[0.0, -200.0]]), torch.tensor([[0.0, -torch.inf]])).item() == 0.0


@EVERY
@BETAS
@pytest.mark.parametrize("k", [1, 5, 31, 32])
def test_buckets_lose_information_and_the_whole_vocabulary_loses_none(name: str, beta: float, k: int):
    student_NV, teacher_NV = log_probs(40, 32, 12), log_probs(40, 32, 13)
    kept_NK = teacher_NV.topk(k).indices
    full_N = DISTRIBUTION_OBJECTIVES[name](student_NV, teacher_NV, beta)
    cut_N = DISTRIBUTION_OBJECTIVES[name](bucketed(student_NV, kept_NK), bucketed(teacher_NV, kept_NK), beta)
    assert (cut_N <= full_N + 1e-5).all()
    if k >= 31:  # a tail of one token is that token
        torch.testing.assert_close(cut_N, full_N, rtol=1e-4, atol=1e-6)
    else:
        assert (cut_N < full_N - 1e-4).any()


@EVERY
@pytest.mark.parametrize("k", [3, 12])
def test_gradient_through_buckets(name: str, k: int):
    logits_NV = torch.randn(3, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(14), requires_grad=True)
    teacher_NV = log_probs(3, 12, 15).double()
    kept_NK = teacher_NV.topk(k).indices
    teacher_NB = bucketed(teacher_NV, kept_NK)
    assert torch.autograd.gradcheck(
        lambda x: DISTRIBUTION_OBJECTIVES[name](bucketed(x.log_softmax(-1), kept_NK), teacher_NB, 0.3), logits_NV
    )


def test_buckets_are_a_distribution():
    logprobs_NV = log_probs(7, 50, 16)
    buckets_NB = bucketed(logprobs_NV, torch.stack([torch.randperm(50)[:9] for _ in range(7)]))
    assert buckets_NB.shape == (7, 10)
    torch.testing.assert_close(buckets_NB.logsumexp(-1), torch.zeros(7), atol=1e-5, rtol=0)


def test_padded_rows_of_the_embedding_take_no_part():
    logits_NV = torch.randn(4, 10, generator=torch.Generator().manual_seed(17))
    padded_NP = torch.cat([logits_NV, torch.full((4, 6), 50.0)], -1).requires_grad_()
    logprobs_NV = log_probabilities(padded_NP, 10)
    assert torch.equal(logprobs_NV, logits_NV.log_softmax(-1))
    (gradient_NP,) = torch.autograd.grad(forward_kl(logprobs_NV, log_probs(4, 10, 18)).sum(), padded_NP)
    assert (gradient_NP[:, 10:] == 0).all()


@EVERY
@pytest.mark.parametrize("rows", [1, 6])
def test_views_are_as_good_as_copies(name: str, rows: int):
    """Every second column of a wider tensor, a transpose, and one row that stands for all."""
    wide_NV = log_probs(rows, 26, 20, spread=1).requires_grad_()
    across_VN = log_probs(13, rows, 21, spread=1)
    for teacher_NV in (across_VN.T, log_probs(1, 13, 22).expand(rows, -1)):
        views = wide_NV[:, ::2], teacher_NV
        found, expected = (
            DISTRIBUTION_OBJECTIVES[name](student_NV, teacher_NV, 0.3)
            for student_NV, teacher_NV in (views, tuple(view.contiguous() for view in views))
        )
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(value_N.sum(), wide_NV, retain_graph=True)[0] for value_N in (found, expected)]
        torch.testing.assert_close(*gradients)
