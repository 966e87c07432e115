"""`reflux evaluate`: the table of a run for a model that no run of ours made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reflux.components import sources
from reflux.components.algorithms.draws import Sampling
from reflux.components.algorithms.rollouts import Request, rollout
from reflux.components.collect_traces.prompts import load_prompts
from reflux.components.evaluate.candidates import given, lacks_kernels
from reflux.components.evaluate.compare import compare
from reflux.components.evaluate.config import EvaluateConfig
from reflux.components.evaluate.heldout import Trace
from reflux.components.evaluate.room import require_room
from reflux.components.evaluate.text import evaluation_text
from reflux.components.models import context_length, load_model, load_tokenizer, require_same_tokenizer

ANSWER_TOKENS = 64
"""Of the base model's answers that the others are held against."""


def evaluate(path: Path, config: EvaluateConfig, prompts_uri: str) -> dict[str, Any]:
    """{"model", "table": [{scheme, …}], "not_run": [{scheme, reason}]}: the model at `path`, a bundle or a checkpoint,
    beside `config.student_uri`, which it was made from and whose greedy answers to the prompts are the held-out ones.

    ValueError for a model that cannot be read or has another tokenizer, and for sizes that do not fit.
    """
    base = sources.fetch(config.student_uri)
    compared = given(path, base)
    tokenizer, context = load_tokenizer(base), context_length(base)
    require_same_tokenizer(load_tokenizer(path), tokenizer)
    text_path = sources.fetch(config.eval_text_uri) if config.eval_text_uri else None
    text = evaluation_text(text_path, tokenizer, windows=config.windows, window_tokens=config.window_tokens)
    prompts = _prompts(sources.fetch(prompts_uri), tokenizer, context, config)
    require_room(config, [len(prompt.prompt_token_ids) for prompt in prompts], context)
    rows = compare(config, compared, tokenizer=tokenizer, text=text, heldout=_answered(base, tokenizer, prompts))
    missing = lacks_kernels(path) if (path / "quant_config.json").is_file() else None
    not_run = [] if missing is None else [{"scheme": "deployed", "reason": missing}]
    return {"model": str(path), "table": [row.as_json() for row in rows], "not_run": not_run}


def _prompts(path: Path, tokenizer: Any, context: int, config: EvaluateConfig) -> list[Trace]:
    """The first prompts by id, not answered yet."""
    usable, _ = load_prompts(
        path, tokenizer, heldout_fraction=0.5, max_prompt_tokens=context, max_total_tokens=context - ANSWER_TOKENS
    )
    return [
        Trace(
            trace_id=prompt.prompt_id,
            prompt_id=prompt.prompt_id,
            prompt=prompt.text,
            prompt_token_ids=prompt.token_ids,
            response_token_ids=[],
        )
        for prompt in sorted(usable, key=lambda prompt: prompt.prompt_id)[: config.heldout_traces or None]
    ]


def _answered(base: Path, tokenizer: Any, prompts: list[Trace]) -> list[Trace]:
    answers = rollout(
        load_model(base),
        [Request(prompt_token_ids=trace.prompt_token_ids, seed=0) for trace in prompts],
        Sampling(temperature=0.0, max_new_tokens=ANSWER_TOKENS),
        eos_token_id=tokenizer.eos_token_id,
        vocab_size=len(tokenizer),
    )
    return [
        Trace(
            trace_id=trace.trace_id,
            prompt_id=trace.prompt_id,
            prompt=trace.prompt,
            prompt_token_ids=trace.prompt_token_ids,
            response_token_ids=answer.response_token_ids,
        )
        for trace, answer in zip(prompts, answers, strict=True)
    ]
