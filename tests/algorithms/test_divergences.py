"""Jensen-Shannon divergence: known values, bounds, symmetry, padded vocabularies; the chunked scorer against a loop."""

from __future__ import annotations

import math

import pytest
import torch

from reflux.components.algorithms import divergences
from reflux.components.algorithms.divergences import (
    jensen_shannon_bits,
    policy_match_rate,
    score_tokens,
)


def random_log_probs(n: int, v: int, seed: int, spread: float = 5.0) -> torch.Tensor:
    return (torch.randn(n, v, generator=torch.Generator().manual_seed(seed)) * spread).log_softmax(-1)


def test_disjoint_distributions_differ_by_one_bit():
    log_p = torch.tensor([[0.0, -math.inf]])
    log_q = torch.tensor([[-math.inf, 0.0]])
    assert jensen_shannon_bits(log_p, log_q).item() == pytest.approx(1.0)


def test_a_known_value():
    # p = (1, 0), q = (1/2, 1/2), m = (3/4, 1/4): (log2(4/3) + (log2(2/3) + log2(2)) / 2) / 2
    expected = (math.log2(4 / 3) + (math.log2(2 / 3) + math.log2(2)) / 2) / 2
    value = jensen_shannon_bits(torch.tensor([[0.0, -math.inf]]), torch.tensor([[0.5, 0.5]]).log())
    assert value.item() == pytest.approx(expected, abs=1e-7)


def test_bounds_and_symmetry():
    log_p, log_q = random_log_probs(200, 50, 0, spread=20), random_log_probs(200, 50, 1, spread=20)
    forward, backward = jensen_shannon_bits(log_p, log_q), jensen_shannon_bits(log_q, log_p)
    assert torch.allclose(forward, backward, atol=1e-6)
    assert forward.min() >= 0
    assert forward.max() <= 1


def test_identical_distributions_match():
    log_p = random_log_probs(64, 1000, 2)
    jsd = jensen_shannon_bits(log_p, log_p)
    assert jsd.max() < 1e-6
    assert policy_match_rate(float(jsd.sum()), 64) == pytest.approx(1.0, abs=1e-6)


def test_finite_where_both_probabilities_underflow():
    log_p = torch.tensor([[0.0, -1e4, -3e38]])
    log_q = torch.tensor([[0.0, -2e4, -math.inf]])
    assert jensen_shannon_bits(log_p, log_q).item() == pytest.approx(0.0, abs=1e-7)


def test_agrees_with_a_loop_in_double_precision():
    log_p, log_q = random_log_probs(8, 30, 3), random_log_probs(8, 30, 4)
    for row, value in enumerate(jensen_shannon_bits(log_p, log_q).tolist()):
        total = 0.0
        for a, b in zip(log_p[row].double().exp().tolist(), log_q[row].double().exp().tolist(), strict=True):
            m = (a + b) / 2
            total += 0.5 * (a * math.log2(a / m) + b * math.log2(b / m))
        assert value == pytest.approx(total, abs=1e-6)


def test_coarse_types_and_other_shapes_are_refused():
    log_p = random_log_probs(2, 5, 0)
    with pytest.raises(ValueError, match="bfloat16"):
        jensen_shannon_bits(log_p, log_p.bfloat16())
    with pytest.raises(ValueError, match="shape"):
        jensen_shannon_bits(log_p, log_p[:, :4])
    with pytest.raises(ValueError, match="tokens 0"):
        policy_match_rate(0.0, 0)


@pytest.mark.parametrize("tokens", [0, 1, divergences.CHUNK, 2 * divergences.CHUNK + 3])
def test_scoring_in_chunks_equals_scoring_at_once(tokens: int):
    torch.manual_seed(tokens)
    hidden, teacher_hidden, targets = torch.randn(tokens, 8), torch.randn(tokens, 6), torch.randint(0, 40, (tokens,))
    head, teacher_head = torch.randn(45, 8), torch.randn(48, 6)  # both padded beyond 40, differently
    nll, jsd = score_tokens(
        hidden, targets, lambda h: h @ head.T, 40, teacher=(teacher_hidden, lambda h: h @ teacher_head.T)
    )
    log_q = (hidden @ head[:40].T).log_softmax(-1)
    log_p = (teacher_hidden @ teacher_head[:40].T).log_softmax(-1)
    assert torch.allclose(nll.float(), -log_q.gather(1, targets[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(jsd.float(), jensen_shannon_bits(log_p, log_q), atol=1e-6)


def test_a_target_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"token 41 .* vocabulary of 40"):
        score_tokens(torch.randn(2, 8), torch.tensor([0, 41]), lambda h: h.repeat(1, 6), 40)
