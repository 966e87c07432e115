"""Whether what evaluate generates fits into the student's context, known as soon as the prompts are."""

from __future__ import annotations

from collections.abc import Sequence

from reflux.components.evaluate.config import EvaluateConfig
from reflux.components.evaluate.measure import WARM_UP_TOKENS


def require_room(config: EvaluateConfig, prompt_tokens: Sequence[int], context: int) -> None:
    """ValueError for sizes that the context (tokens) does not hold. `prompt_tokens`: lengths, in order of trace_id."""
    if config.window_tokens > context:
        raise ValueError(f"evaluate.window_tokens {config.window_tokens}: the student's context is {context}")
    room = context - max(prompt_tokens[: max(1, config.generations)])
    for name, needed in {
        "generation_tokens": config.generation_tokens if config.generations else 0,
        "latency_tokens": config.latency_tokens + WARM_UP_TOKENS + 1,
    }.items():
        if needed > room:
            raise ValueError(
                f"evaluate.{name}: {needed} tokens after the prompt, the student's context has room for {room}"
            )
