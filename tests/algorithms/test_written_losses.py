"""Losses over written tokens: their mean over draws against whole distributions, and the distribution drawn from."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from reflux.components.algorithms.losses import forward_kl, reverse_kl
from reflux.components.algorithms.written_losses import (
    Written,
    discounted_later,
    drawn_from,
    group_advantages,
    next_token,
    sampled_reverse_kl,
    sharpening,
    verifier,
)

V = 7


def distributions(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the student, log-probabilities of the teacher; one row for each token that may be drawn."""
    generator = torch.Generator().manual_seed(seed)
    logits_V, teacher_V = (2 * torch.randn(V, dtype=torch.float64, generator=generator) for _ in range(2))
    return logits_V.requires_grad_(), teacher_V.log_softmax(-1)


@pytest.mark.parametrize("shift", [0.0, 0.7])
def test_its_mean_over_draws_is_the_reverse_kl_in_value_and_gradient(shift: float) -> None:
    """Also for draws of an older student, which `shift` moves away from this one."""
    logits_V, teacher_V = distributions(0)
    student_V = logits_V.log_softmax(-1)
    drawn_V = (logits_V.detach() + shift * torch.arange(V)).log_softmax(-1)
    each_V = sampled_reverse_kl(Written(student_N=student_V, teacher_N=teacher_V, drawn_N=drawn_V))
    mean = (drawn_V.exp() * each_V).sum()
    exact = reverse_kl(student_V[None], teacher_V[None])[0]
    torch.testing.assert_close(mean, exact)
    found, expected = (torch.autograd.grad(value, logits_V, retain_graph=True)[0] for value in (mean, exact))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(("temperature", "top_p"), [(0.6, 1.0), (1.0, 0.8), (0.7, 0.9)])
def test_renormalised_draws_give_the_divergence_of_what_was_drawn_from(temperature: float, top_p: float) -> None:
    logits_V, teacher_V = distributions(1)
    drawn_V = drawn_from(logits_V.log_softmax(-1)[None], temperature, top_p)[0]
    kept_V = drawn_V > -torch.inf
    assert kept_V.all() == (top_p == 1)
    each_V = sampled_reverse_kl(Written(student_N=drawn_V, teacher_N=teacher_V, drawn_N=drawn_V.detach()))
    mean = (drawn_V.detach().exp() * each_V).sum()
    exact = (drawn_V[kept_V].exp() * (drawn_V[kept_V] - teacher_V[kept_V])).sum()
    torch.testing.assert_close(mean, exact)
    found, expected = (torch.autograd.grad(value, logits_V, retain_graph=True)[0] for value in (mean, exact))
    torch.testing.assert_close(found, expected)
    plain = reverse_kl(logits_V.log_softmax(-1)[None], teacher_V[None])[0]
    assert abs(mean - plain) > 0.01  # what the uncorrected estimate would be held for


def test_the_gradient_is_the_advantage_times_that_of_the_logarithm() -> None:
    logits_V, teacher_V = distributions(2)
    student_V = logits_V.log_softmax(-1)
    token, later = 3, -0.4
    written = Written(
        student_N=student_V[token, None],
        teacher_N=teacher_V[token, None],
        drawn_N=student_V.detach()[token, None],
        later_N=torch.tensor([later], dtype=torch.float64),
    )
    (found_V,) = torch.autograd.grad(sampled_reverse_kl(written).sum(), logits_V, retain_graph=True)
    advantage = (teacher_V[token] - student_V[token]).item() + later
    probability_V = np.exp(student_V.detach().numpy())
    np.testing.assert_allclose(found_V.numpy(), -advantage * (np.eye(V)[token] - probability_V), rtol=1e-9)


@pytest.mark.parametrize("edge", ["now", "then", "both"])
def test_a_token_on_the_edge_of_a_nucleus_counts_nothing(edge: str) -> None:
    base = torch.tensor([-1.0, -2.0], requires_grad=True)
    outside = torch.tensor([True, False])
    student_N = base.masked_fill(outside, -torch.inf) if edge != "then" else base
    drawn_N = torch.tensor([-1.0, -2.0]).masked_fill(outside, -torch.inf if edge != "now" else -1.0)
    loss_N = sampled_reverse_kl(Written(student_N=student_N, teacher_N=torch.tensor([-3.0, -3.0]), drawn_N=drawn_N))
    assert loss_N.tolist() == [0.0, 1.0]
    assert torch.autograd.grad(loss_N.sum(), base)[0].tolist() == [0.0, 1.0]


def test_next_token_is_the_forward_kl_to_a_teacher_that_is_certain() -> None:
    student_NV = torch.randn(5, V, generator=torch.Generator().manual_seed(3)).log_softmax(-1)
    token_N = torch.tensor([0, 3, 3, 6, 1])
    certain_NV = torch.full((5, V), -torch.inf).scatter(1, token_N[:, None], 0.0)
    found_N = next_token(Written(student_N=student_NV.gather(1, token_N[:, None])[:, 0]))
    torch.testing.assert_close(found_N, forward_kl(student_NV, certain_NV))


def test_sharpening_weighs_the_likelihood() -> None:
    student_N = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    loss_N = sharpening(Written(student_N=student_N, weight_N=torch.tensor([2.0, 0.0, 1.0])))
    assert loss_N.tolist() == [2.0, 0.0, 0.5]
    assert torch.autograd.grad(loss_N.sum(), student_N)[0].tolist() == [-2.0, 0.0, -1.0]


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
def test_later_advantages_stay_within_their_sequence(discount: float) -> None:
    reward_N = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    lengths = [4, 0, 1, 4]
    found = discounted_later(reward_N, lengths, discount).tolist()
    expected, start = [], 0
    for length in lengths:
        own = reward_N[start : start + length].tolist()
        expected += [sum(discount ** (s - t) * own[s] for s in range(t + 1, length)) for t in range(length)]
        start += length
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.7), (0.8, 0.95), (2.0, 0.01)])
def test_the_distribution_drawn_from_by_its_definition(temperature: float, top_p: float) -> None:
    logits_NV = (2 * torch.randn(20, V, generator=torch.Generator().manual_seed(5))).double()
    found_NV = drawn_from(logits_NV.log_softmax(-1), temperature, top_p).exp().numpy()
    for logits, found in zip(logits_NV.numpy(), found_NV, strict=True):
        probability = np.exp(logits / temperature)
        probability /= probability.sum()
        order = np.argsort(-probability)
        size = int(np.searchsorted(np.cumsum(probability[order]), top_p - 1e-12)) + 1
        kept = np.zeros(V)
        kept[order[:size]] = probability[order[:size]]
        np.testing.assert_allclose(found, kept / kept.sum(), atol=1e-12)


def test_without_discount_the_whole_sequence_is_what_is_brought_nearer() -> None:
    """Over all sequences of three tokens, discount 1 has the gradient of the sequence-level reverse KL."""
    words, length = 3, 3
    sequences = torch.tensor(list(itertools.product(range(words), repeat=length)))
    first = [sum(words**t for t in range(place)) for place in range(length)]
    number_ST = torch.stack(
        [(sequences[:, :t] * words ** torch.arange(t - 1, -1, -1)).sum(-1) for t in range(length)], -1
    )
    rows_ST = number_ST.long() + torch.tensor(first)
    generator = torch.Generator().manual_seed(6)
    logits_PV, teacher_PV = (torch.randn(13, words, dtype=torch.float64, generator=generator) for _ in range(2))
    logits_PV.requires_grad_()

    def nats(of_PV: torch.Tensor) -> torch.Tensor:
        return of_PV.log_softmax(-1)[rows_ST, sequences]

    student_ST, teacher_ST = nats(logits_PV), nats(teacher_PV)
    probability_S = student_ST.sum(-1).exp()
    exact = (probability_S * (student_ST - teacher_ST).sum(-1)).sum()
    reward_N = (teacher_ST - student_ST).detach().flatten()
    written = Written(
        student_N=student_ST.flatten(),
        teacher_N=teacher_ST.flatten(),
        drawn_N=student_ST.detach().flatten(),
        later_N=discounted_later(reward_N, [length] * len(sequences), 1.0),
    )
    mean = (probability_S.detach()[:, None] * sampled_reverse_kl(written).view(-1, length)).sum()
    found, expected = (torch.autograd.grad(value, logits_PV, retain_graph=True)[0] for value in (mean, exact))
    torch.testing.assert_close(found, expected)


def test_greedy_answers_have_no_density() -> None:
    with pytest.raises(ValueError, match="temperature 0: greedy"):
        drawn_from(torch.zeros(1, V), 0, 1.0)
    assert math.isfinite(drawn_from(torch.zeros(1, V).log_softmax(-1), 0.01, 1.0).sum())


def test_advantages_are_those_of_the_group_and_nothing_where_all_are_alike() -> None:
    reward_GM = torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0.2, 0.7, 0.1, 3]])
    reward = reward_GM.double().numpy()
    deviation = reward.std(-1, keepdims=True)
    expected = np.where(deviation > 0, (reward - reward.mean(-1, keepdims=True)) / np.maximum(deviation, 1e-300), 0)
    np.testing.assert_allclose(group_advantages(reward_GM).numpy(), expected, rtol=1e-5, atol=1e-6)
    assert not group_advantages(reward_GM)[2:4].any()
    assert not group_advantages(torch.ones(3, 1)).any()


@pytest.mark.parametrize("shift", [0.0, 0.7])
def test_the_verifiers_mean_over_draws_is_the_policy_gradient(shift: float) -> None:
    """Of the expected advantage; also for draws of an older student."""
    logits_V, _ = distributions(7)
    student_V = logits_V.log_softmax(-1)
    drawn_V = (logits_V.detach() + shift * torch.arange(V)).log_softmax(-1)
    advantage_V = torch.linspace(-1, 2, V, dtype=torch.float64)
    each_V = verifier(Written(student_N=student_V, drawn_N=drawn_V, advantage_N=advantage_V))
    (found_V,) = torch.autograd.grad((drawn_V.exp() * each_V).sum(), logits_V, retain_graph=True)
    probability = np.exp(student_V.detach().numpy())
    gain = advantage_V.numpy() - (probability * advantage_V.numpy()).sum()
    np.testing.assert_allclose(found_V.numpy(), -probability * gain, rtol=1e-9)
