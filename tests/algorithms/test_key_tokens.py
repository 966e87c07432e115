"""Key-token strategies on distributions whose score is known."""

from __future__ import annotations

import pytest
import torch

from reflux.components.algorithms.key_tokens import STRATEGIES, Evidence, confidence, entropy, key_token_score


def evidence(*distributions: list[float], temperature: float = 1.0) -> Evidence:
    return of_logits(torch.tensor(distributions).log(), temperature)


def of_logits(logits_NV: torch.Tensor, temperature: float) -> Evidence:
    entropy_nats_N = torch.special.entr(torch.softmax(logits_NV.float(), -1)).sum(-1)
    return Evidence(logits_NV=logits_NV, entropy_nats_N=entropy_nats_N, temperature=temperature)


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_every_strategy_scores_each_token_between_0_and_1(name: str) -> None:
    logits_NV = 30 * torch.randn(50, 33, generator=torch.Generator().manual_seed(0))
    score_N = STRATEGIES[name](of_logits(logits_NV.bfloat16(), 1.5))
    assert score_N.shape == (50,)
    assert score_N.dtype == torch.float32
    assert ((score_N >= 0) & (score_N <= 1)).all()
    shifted_N = STRATEGIES[name](of_logits(logits_NV.bfloat16().float() + 7, 1.5))
    torch.testing.assert_close(score_N, shifted_N, atol=1e-4, rtol=0)


def test_entropy_counts_the_equal_choices() -> None:
    score_N = entropy(evidence([1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25, 0.25, 0.25, 0.25]))
    torch.testing.assert_close(score_N, torch.tensor([0, 0.5, 0.75]))


def test_confidence_is_high_at_both_ends() -> None:
    score_N = confidence(evidence([1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25, 0.25, 0.25, 0.25]))
    torch.testing.assert_close(score_N, torch.tensor([1, 0, 0.5]))


def test_temperature_moves_confidence_towards_doubt() -> None:
    sharp, softened = evidence([0.9, 0.1]), evidence([0.9, 0.1], temperature=2.0)
    torch.testing.assert_close(confidence(softened), torch.tensor([2 * 0.75 - 1]))  # sqrt(.9) : sqrt(.1) = 3 : 1
    assert confidence(softened) < confidence(sharp)


def test_score_is_the_weighted_mean() -> None:
    seen = evidence([0.7, 0.2, 0.1], [0.4, 0.3, 0.3])
    score_N = key_token_score(seen, ["confidence", "entropy"], [1.0, 3.0])
    torch.testing.assert_close(score_N, 0.25 * confidence(seen) + 0.75 * entropy(seen))


@pytest.mark.parametrize(
    ("strategies", "weights", "message"),
    [
        (["luck"], [1.0], "luck.*confidence"),
        ([], [], "one or more"),
        (["entropy"], [1.0, 2.0], "one is needed for each"),
        (["entropy"], [0.0], "positive sum"),
        (["entropy"], [float("nan")], "positive sum"),
    ],
)
def test_bad_mixtures_are_refused(strategies: list[str], weights: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        key_token_score(evidence([0.5, 0.5]), strategies, weights)
