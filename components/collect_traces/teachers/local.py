"""The teacher as a transformers model in this process: its logits, states and attention are all at hand.

Distributions come from the logits of generation itself, step by step; nothing at full vocabulary outlives its step.

Shapes: B rows being answered, V vocabulary, T response tokens.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reflux.components.algorithms.draws import Sampling, derive_seed
from reflux.components.algorithms.key_tokens import Evidence, key_token_score
from reflux.components.algorithms.packed_linears import packed_linears
from reflux.components.algorithms.rollouts import Request, rollout
from reflux.components.algorithms.sampled_teacher import SampledTeacher, joined, sampled_counts
from reflux.components.algorithms.sparse_teacher import SparseTeacher, sparse_topk
from reflux.components.collect_traces.answers import Answer
from reflux.components.collect_traces.captured import Captured, capture, require_layers, wanted
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.collect_traces.prompts import Prompt
from reflux.components.collect_traces.steps import step_starts, token_pieces
from reflux.components.collect_traces.teachers.teacher import OF_VOCABULARY, Teacher
from reflux.components.models import load_model


def local_teacher(path: Path, digest: str, tokenizer: Any, config: CollectTracesConfig) -> Teacher:
    """The model at `path`, loaded when it is first asked. It answers `config.batch_size` prompts at a time: the size of
    a batch changes the last bits of the logits, so the same prompts in other batches are not quite the same traces.
    """

    def answers(prompts: Iterable[Prompt]) -> Generator[Answer, None, None]:
        waiting, model = iter(prompts), None
        with ExitStack() as held:
            while batch := list(islice(waiting, config.batch_size)):
                if model is None:
                    model = load_model(path, config.dtype).to(_device(config.device))
                    require_layers(model, config)
                    held.enter_context(packed_linears(model))
                yield from _answered(model, tokenizer, batch, config, digest)

    return Teacher(teacher_id=digest, entropy_of=OF_VOCABULARY, answers=answers)


def _answered(
    model: Any, tokenizer: Any, prompts: list[Prompt], config: CollectTracesConfig, teacher_id: str
) -> Iterator[Answer]:
    seen: list[list[tuple[Tensor, ...]]] = [[] for _ in prompts]
    drawn: list[list[SampledTeacher]] = [[] for _ in prompts]
    dice = [torch.Generator().manual_seed(derive_seed(config.seed, prompt.prompt_id, "draws")) for prompt in prompts]

    def on_step(rows: list[int], logits_BV: Tensor) -> None:
        kept_tokens = min(config.top_k, len(tokenizer))  # draws may be more
        sparse = sparse_topk(logits_BV, kept_tokens, vocab_size=len(tokenizer))
        evidence = Evidence(
            logits_NV=logits_BV, entropy_nats_N=sparse.entropy_nats_N, temperature=config.key_token_temperature
        )
        score_B = key_token_score(evidence, config.key_token_strategies, config.key_token_weights)
        kept = (sparse.token_ids_NK, sparse.logprobs_NK, sparse.tail_logmass_N, sparse.entropy_nats_N, score_B)
        for row, values in zip(rows, zip(*(column.cpu() for column in kept), strict=True), strict=True):
            seen[row].append(values)
        if config.trace_store == "sampled":
            draws = sampled_counts(
                logits_BV, config.top_k, vocab_size=len(tokenizer), generators=[dice[row] for row in rows]
            )
            for row, ids_U, counts_U in zip(rows, draws.token_ids_NU.cpu(), draws.counts_NU.cpu(), strict=True):
                drawn[row].append(SampledTeacher(token_ids_NU=ids_U[None], counts_NU=counts_U[None]))

    done = rollout(
        model,
        [
            Request(prompt_token_ids=prompt.token_ids, seed=derive_seed(config.seed, prompt.prompt_id))
            for prompt in prompts
        ],
        Sampling(temperature=config.temperature, top_p=config.top_p, max_new_tokens=config.max_new_tokens),
        eos_token_id=tokenizer.eos_token_id,
        vocab_size=len(tokenizer),
        on_step=on_step,
    )
    for prompt, rolled, steps, draws in zip(prompts, done, seen, drawn, strict=True):
        ids_TK, logprobs_TK, tail_T, entropy_T, score_T = map(torch.stack, zip(*steps, strict=True))
        yield Answer(
            prompt=prompt,
            teacher_id=teacher_id,
            response_token_ids=rolled.response_token_ids,
            stop_reason=rolled.stop_reason,
            sparse=SparseTeacher(
                token_ids_NK=ids_TK, logprobs_NK=logprobs_TK, tail_logmass_N=tail_T, entropy_nats_N=entropy_T
            ),
            key_token_score_T=score_T,
            sampled=joined(draws) if draws else None,
            captured=_captured(model, tokenizer, prompt, rolled.response_token_ids, config) if wanted(config) else None,
        )


def _captured(model: Any, tokenizer: Any, prompt: Prompt, response: list[int], config: CollectTracesConfig) -> Captured:
    starts = step_starts(token_pieces(tokenizer, response)) if config.state_layers else []
    return capture(model, prompt.token_ids, response, starts, config)


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name
