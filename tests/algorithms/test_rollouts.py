"""Rollouts against model.generate and against teacher-forced forwards of the same tokens."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from reflux.components.algorithms.draws import Sampling, derive_seed
from reflux.components.algorithms.rollouts import Request, Rollout, rollout
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
    how = {name: options.pop(name) for name in ("on_step", "slots") if name in options}
    return rollout(
        model,
        [Request(prompt_token_ids=prompt, seed=seed) for prompt, seed in zip(prompts, seeds, strict=True)],
        Sampling(**{"max_new_tokens": 24, **options}),
        eos_token_id=tokenizer.eos_token_id,
        vocab_size=len(tokenizer),
        **how,
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


@pytest.mark.parametrize("slots", [1, 3, 7])
def test_a_place_that_falls_free_is_taken_by_the_next_request(
    model: Any, tokenizer: Any, prompts: list[list[int]], slots: int
) -> None:
    many, seeds = prompts * 3, list(range(12))
    ending = endable(model, tokenizer)
    together = answer(ending, tokenizer, many, seeds, temperature=1.3)
    under_way: list[int] = []
    in_turn = answer(
        ending, tokenizer, many, seeds, temperature=1.3, slots=slots,
        on_step=lambda rows, logits_BV: under_way.append(len(rows)),
    )  # fmt: skip
    assert in_turn == together
    tokens = sum(len(done.response_token_ids) for done in together)
    assert max(under_way) == slots
    assert sum(under_way) == tokens  # no row is computed after its end
    full = tokens - sum(range(slots)) * 24  # the last ones may be alone for as long as an answer is at most
    assert under_way.count(slots) * slots >= full


def test_the_prompt_of_a_group_is_read_once(model: Any, tokenizer: Any, prompts: list[list[int]]) -> None:
    read: list[int] = []
    hook = model.model.embed_tokens.register_forward_hook(lambda module, args, output: read.append(args[0].numel()))
    grouped = [prompt for prompt in prompts for _ in range(4)]
    try:
        done = answer(model, tokenizer, grouped, list(range(16)), slots=16)
    finally:
        hook.remove()
    longest = max(map(len, prompts)) - 1
    assert sum(read) <= 4 * longest + sum(len(rolled.response_token_ids) for rolled in done)
    alone = [answer(model, tokenizer, [prompt], [seed])[0] for seed, prompt in enumerate(grouped)]
    assert done == alone
    assert len({tuple(rolled.response_token_ids) for rolled in done}) == 16


def test_a_prompt_of_one_token_is_answered(model: Any, tokenizer: Any, prompts: list[list[int]]) -> None:
    alone = answer(model, tokenizer, [[5]], [3])[0]
    assert answer(model, tokenizer, [[5], prompts[0]], [3, 4])[0] == alone
    forced = model(input_ids=torch.tensor([[5]])).logits[0, 0, : len(tokenizer)]
    first = answer(model, tokenizer, [[5]], [3], temperature=0, max_new_tokens=1)[0]
    assert first.response_token_ids == [int(forced.argmax())]


def test_a_window_shorter_than_the_answers_is_refused(model: Any, tokenizer: Any, prompts: list[list[int]]) -> None:
    sliding = copy.deepcopy(model)
    sliding.config.sliding_window, sliding.config.layer_types = 40, ["sliding_attention"] * 2
    with pytest.raises(ValueError, match="sliding_window 40"):
        answer(sliding, tokenizer, prompts, [0] * 4, max_new_tokens=40)


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


def test_bad_batches_are_refused(model: Any, tokenizer: Any, prompts: list[list[int]]) -> None:
    assert answer(model, tokenizer, [], []) == []
    with pytest.raises(ValueError, match=r"prompts \[1\] have no tokens"):
        answer(model, tokenizer, [prompts[0], []], [0, 0])
    with pytest.raises(FloatingPointError, match=r"rows \[0, 1\]"):
        answer(Biased(model, {5: float("nan")}), tokenizer, prompts[:2], [0, 0])
    with pytest.raises(ValueError, match="do not fit"):
        rollout(model, [Request(prompt_token_ids=prompts[0], seed=0)], Sampling(), eos_token_id=2, vocab_size=10_000)


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
