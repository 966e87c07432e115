"""What the student answers while it learns, for people to read: the same prompts again and again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reflux.components import processes
from reflux.components.algorithms.draws import Sampling
from reflux.components.algorithms.rollouts import Engine, Request

from .examples import Sequence

SHOWN_CHARACTERS = 100
"""Of prompt and answer on the terminal; the table has them whole."""


def generations(
    engine: Engine, tokenizer: Any, examples: Mapping[str, Sequence], *, step: int, max_new_tokens: int
) -> list[dict[str, Any]]:
    """Rows of schemas.TRAINING_GENERATIONS: the student's greedy answers to the prompts of `examples`, by trace id."""
    prompts = {name: s.token_ids[: s.first_scored] for name, s in examples.items()}
    greedy = Sampling(temperature=0.0, top_p=1.0, max_new_tokens=max_new_tokens)
    answers = engine([Request(prompt_token_ids=ids, seed=0) for ids in prompts.values()], greedy)
    return [
        {
            "step": step,
            "trace_id": name,
            "prompt": tokenizer.decode(answer.prompt_token_ids, skip_special_tokens=True),
            "answer": tokenizer.decode(answer.response_token_ids, skip_special_tokens=True),
            "answer_tokens": len(answer.response_token_ids),
            "ended": answer.stop_reason == "eos",
        }
        for name, answer in zip(prompts, answers, strict=True)
    ]


def show(rows: list[dict[str, Any]]) -> None:
    """A line each on the terminal."""
    if processes.is_first():
        for row in rows:
            prompt, answer = (" ".join(row[name].split())[:SHOWN_CHARACTERS] for name in ("prompt", "answer"))
            print(f"step {row['step']}: {prompt} -> {answer}", flush=True)
