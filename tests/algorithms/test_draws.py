"""Draws against the distribution that they are said to come from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reflux.components.algorithms.draws import BLOCK, Sampling, draw


@pytest.mark.parametrize("top_p", [0.05, 0.6, 0.95, 1.0])
def test_draws_follow_the_nucleus_of_the_tempered_distribution(top_p: float) -> None:
    logits_V = torch.randn(700, generator=torch.Generator().manual_seed(0))  # wider than the candidates sorted first
    draws, temperature = 4000, 0.8
    probs, order = torch.softmax(logits_V / temperature, -1).sort(descending=True)
    size = 700 if top_p == 1 else int((probs.cumsum(-1) < top_p).sum()) + 1
    expected = torch.zeros(700).scatter(0, order[:size], probs[:size] / probs[:size].sum())

    generator = torch.Generator().manual_seed(1)
    tokens = draw(logits_V.expand(draws, -1), Sampling(temperature=temperature, top_p=top_p), [generator] * draws)
    counts = torch.bincount(tokens, minlength=700) / draws
    assert set(tokens.tolist()) <= set(order[:size].tolist())
    total_variation = (counts - expected).abs().sum() / 2
    assert total_variation < (size / draws) ** 0.5  # its expectation is below half of this


@pytest.mark.parametrize(
    ("options", "named"),
    [({"temperature": -1.0}, "temperature"), ({"temperature": float("nan")}, "temperature"), ({"top_p": 0.0}, "top_p"),
     ({"top_p": 1.1}, "top_p"), ({"max_new_tokens": 0}, "max_new_tokens")],
)  # fmt: skip
def test_sampling_refuses_what_it_cannot_do(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Sampling(**options)


@pytest.mark.parametrize("vocabulary", [1, BLOCK - 1, BLOCK, 2 * BLOCK + 3])
def test_an_impossible_token_is_never_drawn(vocabulary: int) -> None:
    """Whether it stands at the end of a block, of the vocabulary, or fills a block."""
    generator = torch.Generator().manual_seed(2)
    logits_BV = torch.randn(64, vocabulary, generator=generator)
    possible_BV = torch.rand(64, vocabulary, generator=generator) < 0.02
    possible_BV[:, vocabulary // 2] = True
    logits_BV.masked_fill_(~possible_BV, -torch.inf)
    for _ in range(20):
        token_B = draw(logits_BV, Sampling(temperature=1.0, top_p=1.0), [generator] * 64)
        assert possible_BV[torch.arange(64), token_B].all()


def test_a_draw_does_not_depend_on_the_other_rows() -> None:
    logits_BV = torch.randn(5, 3 * BLOCK + 7, generator=torch.Generator().manual_seed(3)) * 4
    sampling = Sampling(temperature=0.7, top_p=1.0)

    def drawn(rows: list[int]) -> list[int]:
        return draw(logits_BV[rows], sampling, [torch.Generator().manual_seed(row) for row in rows]).tolist()

    assert drawn([0, 1, 2, 3, 4]) == [drawn([row])[0] for row in range(5)] == drawn([4, 3, 2, 1, 0])[::-1]
