"""Rollouts against model.generate and against teacher-forced forwards of the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from reflux.components.algorithms.rollouts import Rollout, Sampling, derive_seed, draw, rollout
from reflux.components.models import chat_token_ids, load_model, load_tokenizer

TEXTS = ["Hi", "List three colours of autumn.", "Why is the sky blue?", "Add 2 and 3."]


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    return load_model(tiny_model)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(tiny_model)


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    return [list(chat_token_ids(tokenizer, text)) for text in TEXTS]


def answer(model: Any, tokenizer: Any, prompts: list[list[int]], seeds: list[int], **options: Any) -> list[Rollout]:
    on_step = options.pop("on_step", None)
    return rollout(
        model,
        prompts,
        Sampling(**{"max_new_tokens": 24, **options}),
        seeds=seeds,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        vocab_size=len(tokenizer),
        on_step=on_step,
    )


def forced_logits(model: Any, tokenizer: Any, done: Rollout) -> torch.Tensor:
    """[T, V] logits of each response token from one unpadded forward."""
    ids = torch.tensor([done.prompt_token_ids + done.response_token_ids])
    start = len(done.prompt_token_ids) - 1
    return model(input_ids=ids).logits[0, start:-1, : len(tokenizer)]


def test_greedy_equals_generate(model: Any, tokenizer: Any, prompts: list[list[int]]) -> None:
    padded_rows = list(range(len(tokenizer), model.config.vocab_size))
    for prompt, done in zip(prompts, answer(model, tokenizer, prompts, [0] * 4, temperature=0), strict=True):
        expected = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=24,
            do_sample=False,
            suppress_tokens=padded_rows,
            pad_token_id=tokenizer.pad_token_id,
        )
        assert done.response_token_ids == expected[0, len(prompt) :].tolist()
        assert done.prompt_token_ids == prompt


def test_draws_of_a_row_do_not_depend_on_its_batch(model: Any, tokenizer: Any, prompts: list[list[int]]) -> None:
    seeds = [derive_seed(7, text) for text in TEXTS]
    together = answer(model, tokenizer, prompts, seeds)
    reversed_order = answer(model, tokenizer, prompts[::-1], seeds[::-1])[::-1]
    alone = [answer(model, tokenizer, [prompt], [seed])[0] for prompt, seed in zip(prompts, seeds, strict=True)]
    assert together == reversed_order == alone
    assert len({tuple(done.response_token_ids) for done in together}) == 4


def test_logits_of_every_step_are_those_of_a_teacher_forced_forward(
    model: Any, tokenizer: Any, prompts: list[list[int]]
) -> None:
    seen: dict[int, list[torch.Tensor]] = {row: [] for row in range(4)}

    def on_step(rows: list[int], logits_BV: torch.Tensor) -> None:
        assert logits_BV.dtype == torch.float32
        for row, logits_V in zip(rows, logits_BV, strict=True):
            seen[row].append(logits_V.clone())

    with_early_end = endable(model, tokenizer)
    done = answer(with_early_end, tokenizer, prompts, [1, 2, 3, 4], on_step=on_step, temperature=1.3)
    assert {rolled.stop_reason for rolled in done} == {"eos", "length"}  # rows left the batch while others went on
    for row, rolled in enumerate(done):
        assert len(seen[row]) == len(rolled.response_token_ids)
        torch.testing.assert_close(
            torch.stack(seen[row]), forced_logits(with_early_end, tokenizer, rolled), atol=2e-4, rtol=1e-4
        )


def test_eos_is_kept_and_ends_the_row(model: Any, tokenizer: Any, prompts: list[list[int]]) -> None:
    for rolled in answer(endable(model, tokenizer), tokenizer, prompts, [1, 2, 3, 4], temperature=1.3):
        ends = [i for i, token in enumerate(rolled.response_token_ids) if token == tokenizer.eos_token_id]
        if rolled.stop_reason == "eos":
            assert ends == [len(rolled.response_token_ids) - 1]
        else:
            assert ends == []
            assert len(rolled.response_token_ids) == 24


def test_padded_vocabulary_is_never_drawn(model: Any, tokenizer: Any, prompts: list[list[int]]) -> None:
    biased = Biased(model, dict.fromkeys(range(len(tokenizer), model.config.vocab_size), 50.0))
    for options in ({"temperature": 0.0}, {"temperature": 2.0, "top_p": 1.0}):
        for rolled in answer(biased, tokenizer, prompts, [0, 1, 2, 3], **options):
            assert max(rolled.response_token_ids) < len(tokenizer)


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


def test_bad_batches_are_refused(model: Any, tokenizer: Any, prompts: list[list[int]]) -> None:
    assert answer(model, tokenizer, [], []) == []
    with pytest.raises(ValueError, match="one seed per prompt"):
        answer(model, tokenizer, prompts, [0])
    with pytest.raises(ValueError, match=r"prompts \[1\] have no tokens"):
        answer(model, tokenizer, [prompts[0], []], [0, 0])
    with pytest.raises(FloatingPointError, match=r"rows \[0, 1\]"):
        answer(Biased(model, {5: float("nan")}), tokenizer, prompts[:2], [0, 0])
    with pytest.raises(ValueError, match="do not fit"):
        rollout(model, prompts[:1], Sampling(), seeds=[0], eos_token_id=2, pad_token_id=0, vocab_size=10_000)


class Biased(torch.nn.Module):
    """The model with a constant added to the logits of some tokens."""

    def __init__(self, model: Any, bias: dict[int, float]) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        self.bias_V = torch.zeros(model.config.vocab_size)
        for token, value in bias.items():
            self.bias_V[token] = value

    def forward(self, cache: Any = None, **inputs: Any) -> Any:
        output = self.model(cache=cache, **inputs)
        output.logits = output.logits + self.bias_V
        return output


def endable(model: Any, tokenizer: Any) -> Biased:
    """A model that ends an answer often enough for rows to leave the batch at different steps."""
    return Biased(model, {tokenizer.eos_token_id: 3.0})
