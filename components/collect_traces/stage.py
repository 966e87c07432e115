"""Teacher traces: prompts in, answers with sparse distributions out; one shard per batch, so a kill costs one."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from reflux.components.algorithms.key_tokens import check_strategies
from reflux.components.artifacts import Writer
from reflux.components.collect_traces.answers import answer_table
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.collect_traces.prompts import Prompt, load_prompts
from reflux.components.models import (
    context_length,
    load_model,
    load_tokenizer,
    template_fingerprint,
    tokenizer_fingerprint,
)
from reflux.components.progress import report
from reflux.components.records import rejected_table
from reflux.components.schemas import REJECTED, TRACE_STORES


def run(config: CollectTracesConfig, *, traces: Writer) -> dict[str, float]:
    """Write the shards traces/00000, … and the table rejected. Metrics describe all shards, a killed run's too."""
    check_strategies(config.key_token_strategies, config.key_token_weights)
    teacher_path = traces.source("teacher")
    teacher_digest = traces.source_digest("teacher")
    tokenizer = load_tokenizer(teacher_path)
    if config.top_k > len(tokenizer):
        raise ValueError(f"collect_traces.top_k {config.top_k}: the teacher's vocabulary has {len(tokenizer)} tokens")
    prompts, rejected = load_prompts(
        traces.source("prompts_uri"),
        tokenizer,
        heldout_fraction=config.heldout_fraction,
        max_prompt_tokens=config.max_prompt_tokens,
        max_total_tokens=context_length(teacher_path) - config.max_new_tokens,
    )
    schema = TRACE_STORES[config.trace_store](config.top_k).with_metadata(
        _provenance(config, tokenizer, teacher_digest)
    )

    batches = _batches(prompts, config.batch_size)
    names = [f"traces/{index:05d}" for index in range(len(batches))]
    todo = [(name, batch) for name, batch in zip(names, batches, strict=True) if not traces.done(name)]
    answered = len(prompts) - sum(len(batch) for _, batch in todo)
    report(answered, len(prompts), "prompts")
    model = load_model(teacher_path, config.dtype).to(_device(config.device)) if todo else None
    tokens, started = 0, time.monotonic()
    for name, batch in todo:
        table = answer_table(model, tokenizer, batch, config, teacher_digest=teacher_digest, schema=schema)
        traces.write_table(name, table, schema)
        tokens += pc.sum(pc.list_value_length(table["response_token_ids"])).as_py()
        answered += len(batch)
        report(answered, len(prompts), "prompts", f"{tokens / (time.monotonic() - started):.0f} tokens/s")
    seconds = time.monotonic() - started
    traces.write_table("rejected", rejected_table(rejected), REJECTED)

    metrics = _metrics([traces.pending_table(name) for name in names], config) | {"rejected": float(len(rejected))}
    return metrics | ({"tokens_per_second": tokens / seconds} if tokens else {})


def _batches(prompts: list[Prompt], size: int) -> list[list[Prompt]]:
    """Prompts of about the same length together, so that little of a batch is padding; ids break ties."""
    ordered = sorted(prompts, key=lambda prompt: (len(prompt.token_ids), prompt.prompt_id))
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def _provenance(config: CollectTracesConfig, tokenizer: Any, teacher_digest: str) -> dict[str, str]:
    """What a reader compares before it trusts a distribution: whose it is, over which tokens, under which contract."""
    return {
        "teacher_digest": teacher_digest,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "chat_template": template_fingerprint(tokenizer),
        "vocab_size": str(len(tokenizer)),
        "trace_store": config.trace_store,
        "top_k": str(config.top_k),
        "scored_temperature": "1.0",
        "sampled_temperature": str(config.temperature),
        "sampled_top_p": str(config.top_p),
        "seed": str(config.seed),
        "key_token_strategies": ",".join(config.key_token_strategies),
        "key_token_threshold": str(config.key_token_threshold),
    }


def _metrics(shards: list[pa.Table], config: CollectTracesConfig) -> dict[str, float]:
    def per_token(name: str) -> np.ndarray:
        return np.concatenate([shard[name].combine_chunks().flatten().to_numpy() for shard in shards])

    stop_reasons = [reason for shard in shards for reason in shard["stop_reason"].to_pylist()]
    splits = [split for shard in shards for split in shard["split"].to_pylist()]
    entropy = per_token("entropy_nats").astype(np.float64)
    return {
        "prompts": float(len(splits)),
        "heldout_prompts": float(splits.count("heldout")),
        "tokens": float(len(entropy)),
        "entropy_mean_nats": float(entropy.mean()),
        "tail_mass_mean": float(np.exp(per_token("tail_logmass").astype(np.float64)).mean()),
        "key_token_share": float((per_token("key_token_score") >= config.key_token_threshold).mean()),
        "eos_share": stop_reasons.count("eos") / len(stop_reasons),
        "tokens_per_answer": len(entropy) / len(splits),
    }


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name
