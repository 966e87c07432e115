"""Measure every candidate in turn: one model in memory, the next one loaded when it is gone."""

from __future__ import annotations

import gc
from typing import Any

from reflux.components import progress
from reflux.components.algorithms.effective_bits import cost_of_activations, mean_over_weights
from reflux.components.algorithms.low_bit import bits_of_sites, frozen_weights
from reflux.components.algorithms.output_head import output_head

from .candidates import Candidate
from .config import EvaluateConfig
from .footprint import cache_bytes, deployed_bytes, held_bytes
from .heldout import Batch, Trace, batches
from .measure import Decisions, decisions, decode_times_ms, generate, layer_errors, pad_token, text_nats, trace_scores
from .position_errors import position_errors
from .row import Row
from .text import EvaluationText


def compare(
    config: EvaluateConfig,
    candidates: list[Candidate],
    *,
    tokenizer: Any,
    text: EvaluationText,
    heldout: list[Trace],
) -> list[Row]:
    """A row per candidate, in their order. The first one is the teacher for the others."""
    held = batches(heldout, config.batch_traces, pad_token(tokenizer))
    teacher: Decisions | None = None
    full: Decisions | None = None
    rows = []
    for index, candidate in enumerate(candidates):
        progress.report(index, len(candidates), "schemes", candidate.name)
        model = candidate.load()
        with frozen_weights(model):
            grids = bits_of_sites(model, candidate.scheme) if candidate.scheme.needs_policy else {}
            own = decisions(model, output_head(model), held, who=f"evaluate: {candidate.name}", site_bits=grids)
            teacher = teacher or own
            full = own if candidate.role == "full" else full
            rows.append(_row(config, candidate, model, tokenizer, text, heldout, held, own, teacher, full))
        del model, own
        gc.collect()  # hooks and modules refer to each other, and two models may not fit
    progress.report(len(candidates), len(candidates), "schemes")
    return rows


def _row(
    config: EvaluateConfig,
    candidate: Candidate,
    model: Any,
    tokenizer: Any,
    text: EvaluationText,
    heldout: list[Trace],
    held: list[Batch],
    own: Decisions,
    teacher: Decisions,
    full: Decisions | None,
) -> Row:
    costs = candidate.costs_of_weights(model)
    return Row(
        scheme=candidate.name,
        role=candidate.role,
        text_nats=text_nats(model, own.head, text.window_WT, len(tokenizer), who=f"evaluate: {candidate.name}"),
        text_tokens=text.scored_tokens,
        traces=trace_scores(held, own, teacher, len(tokenizer)),
        layer_errors=[] if full is None else layer_errors(own, full),
        generations=generate(model, tokenizer, heldout[: config.generations], config.generation_tokens),
        decode_ms=decode_times_ms(model, tokenizer, heldout[0].prompt_token_ids, config.latency_tokens),
        latency_of=candidate.latency_of,
        memory_bytes=held_bytes(model) if candidate.on_kernels else deployed_bytes(model, costs, candidate.scheme),
        kv_cache_bytes=cache_bytes(model, candidate.scheme, config.window_tokens),
        effective_bits=mean_over_weights(model, costs).total,
        effective_bits_activation=cost_of_activations(model, candidate.scheme).total,
        quantizer_digest=candidate.digest,
        outlier_capture=own.outlier_capture,
        position_errors=[] if full is None or candidate.scheme.rotates else position_errors(own, full, held),
    )
