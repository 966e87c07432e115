"""Teacher traces: prompts in, answers with sparse distributions out; one shard per batch, so a kill costs one."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from reflux.components.algorithms.key_tokens import check_strategies
from reflux.components.artifacts import Writer
from reflux.components.collect_traces.choice import asked_prompts, share_metrics
from reflux.components.collect_traces.config import CollectTracesConfig, part_of
from reflux.components.collect_traces.prompts import Prompt
from reflux.components.collect_traces.shards import shard_schemas, shard_tables
from reflux.components.collect_traces.teachers import open_teachers
from reflux.components.collect_traces.teachers.server import check_server, configured_servers
from reflux.components.collect_traces.teachers.teacher import Teacher
from reflux.components.collect_traces.traits import language_detector, with_traits
from reflux.components.models import context_length, load_tokenizer, template_fingerprint, tokenizer_fingerprint
from reflux.components.progress import report
from reflux.components.records import rejected_table
from reflux.components.schemas import PROMPT_COMPOSITION, REJECTED


def run(config: CollectTracesConfig, *, traces: Writer) -> dict[str, float]:
    """Write the shards traces/00000, … and the tables composition and rejected. Metrics describe all shards, a killed
    run's too. A part writes those shards that fall to it, under the names that they have in the whole, and the first
    part the two tables.
    """
    check_strategies(config.key_token_strategies, config.key_token_weights)
    teacher_path = traces.source("teacher")
    tokenizer = load_tokenizer(teacher_path)
    if config.trace_store == "topk" and config.top_k > len(tokenizer):
        raise ValueError(f"collect_traces.top_k {config.top_k}: the teacher's vocabulary has {len(tokenizer)} tokens")
    asked = asked_prompts(traces.source("prompts_uri"), tokenizer, config, context_length(teacher_path))
    prompts = with_traits(asked.prompts, traces.source("entity_model") if config.entity_model else None)
    teachers = open_teachers(config, teacher_path, traces.source_digest("teacher"), tokenizer)
    provenance = _provenance(config, tokenizer, traces.source_digest("teacher"), teachers)
    schemas = shard_schemas(config, teacher_path, len(tokenizer), provenance)

    work = [(teacher, batch) for teacher in teachers for batch in _batches(prompts, config.batch_size)]
    part, parts = part_of(config.part)
    if parts > len(work):
        raise ValueError(
            f"collect_traces.part {config.part}: there are {len(work)} batches of prompts, so at most as many parts"
        )
    shards = [(f"{index:05d}", teacher, batch) for index, (teacher, batch) in enumerate(work)][part::parts]
    missing = [shard for shard in shards if not _done(traces, shard[0], schemas)]
    waited_for = {teacher.teacher_id for _, teacher, _ in missing}
    for server in configured_servers(config):
        if server.model in waited_for:
            check_server(server, prompts, tokenizer, config)

    total = sum(len(batch) for _, _, batch in shards)
    answered = total - sum(len(batch) for _, _, batch in missing)
    report(answered, total, "prompts")
    tokens, started = 0, time.monotonic()
    for teacher in teachers:
        todo = [(name, batch) for name, owner, batch in missing if owner is teacher]
        with closing(teacher.answers(prompt for _, batch in todo for prompt in batch)) as answers:
            for name, batch in todo:
                rows = shard_tables(list(islice(answers, len(batch))), tokenizer, config, schemas)
                for kind, table in rows.items():
                    if not traces.done(f"{kind}/{name}"):
                        traces.write_table(f"{kind}/{name}", table, schemas[kind])
                tokens += pc.sum(pc.list_value_length(rows["traces"]["response_token_ids"])).as_py()
                answered += len(batch)
                report(answered, total, "prompts", f"{tokens / (time.monotonic() - started):.0f} tokens/s")
    seconds = time.monotonic() - started
    if part == 0:
        traces.write_table("rejected", rejected_table(asked.rejected), REJECTED)
        composition = pa.Table.from_pylist(asked.composition, schema=PROMPT_COMPOSITION)
        traces.write_table("composition", composition, PROMPT_COMPOSITION)

    metrics = _metrics((traces.pending_table(f"traces/{name}") for name, _, _ in shards), config)
    metrics |= {
        "prompts": float(len(prompts)),
        "heldout_prompts": float(sum(prompt.split == "heldout" for prompt in prompts)),
        "anchored_prompts": float(sum(bool(prompt.anchors) for prompt in prompts)),
        "languages": float(len({prompt.language for prompt in prompts})),
        "rejected": float(len(asked.rejected)),
        **share_metrics(asked.composition),
    }
    if config.attention_layers:
        metrics["attention_coverage_mean"] = _coverage(
            traces.pending_table(f"attention/{name}") for name, _, _ in shards
        )
    return metrics | ({"tokens_per_second": tokens / seconds} if tokens else {})


def _done(traces: Writer, shard: str, kinds: Iterable[str]) -> bool:
    """Whether tables of every kind are there; each is looked for, so that none of them is written twice."""
    found = [traces.done(f"{kind}/{shard}") for kind in kinds]
    return all(found)


def _batches(prompts: list[Prompt], size: int) -> list[list[Prompt]]:
    """Prompts of about the same length together, so that little of a batch is padding; ids break ties."""
    ordered = sorted(prompts, key=lambda prompt: (len(prompt.token_ids), prompt.prompt_id))
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def _provenance(
    config: CollectTracesConfig, tokenizer: Any, teacher_digest: str, teachers: list[Teacher]
) -> dict[str, str]:
    """What a reader compares before it trusts a distribution: whose it is, over which tokens, under which contract."""
    return {
        "teacher_digest": teacher_digest,
        "entropy_of": json.dumps({teacher.teacher_id: teacher.entropy_of for teacher in teachers}, sort_keys=True),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "chat_template": template_fingerprint(tokenizer),
        "vocab_size": str(len(tokenizer)),
        "trace_store": config.trace_store,
        "top_k": str(config.top_k),
        "scored_temperature": "1.0",
        "sampled_temperature": str(config.temperature),
        "sampled_top_p": str(config.top_p),
        "max_new_tokens": str(config.max_new_tokens),
        "seed": str(config.seed),
        "key_token_strategies": ",".join(config.key_token_strategies),
        "key_token_threshold": str(config.key_token_threshold),
        "language_detector": language_detector(),
    }


def _metrics(shards: Iterable[pa.Table], config: CollectTracesConfig) -> dict[str, float]:
    """Over all answers; one shard is held at a time."""
    sums: defaultdict[str, float] = defaultdict(float)
    for shard in shards:
        entropy, score = (_per_token(shard, name) for name in ("entropy_nats", "key_token_score"))
        sums["answers"] += shard.num_rows
        sums["eos"] += pc.sum(pc.equal(shard["stop_reason"], "eos")).as_py()
        sums["length"] += pc.sum(pc.equal(shard["stop_reason"], "length")).as_py()
        sums["loops"] += pc.sum(shard["ends_in_loop"]).as_py()
        sums["tokens"] += len(entropy)
        sums["entropy_nats"] += entropy.sum()
        if config.trace_store == "topk":
            sums["tail_mass"] += np.exp(_per_token(shard, "tail_logmass")).sum()
        else:
            sums["distinct_tokens"] += len(pc.list_flatten(pc.list_flatten(shard["sampled_token_ids"])))
        sums["key_tokens"] += (score >= np.float32(config.key_token_threshold)).sum()
    return {
        "answers": float(sums["answers"]),
        "tokens": float(sums["tokens"]),
        "entropy_mean_nats": float(sums["entropy_nats"] / sums["tokens"]),
        "key_token_share": float(sums["key_tokens"] / sums["tokens"]),
        "eos_share": sums["eos"] / sums["answers"],
        "length_share": sums["length"] / sums["answers"],
        "loop_share": sums["loops"] / sums["answers"],
        "tokens_per_answer": sums["tokens"] / sums["answers"],
        **{
            f"{name}_mean": float(sums[name] / sums["tokens"])
            for name in ("tail_mass", "distinct_tokens")
            if name in sums
        },
    }


def _coverage(shards: Iterable[pa.Table]) -> float:
    """Mean over tokens and layers of the share of attention that was kept."""
    sums = [(pc.sum(shard["coverage"]).as_py() or 0.0, shard.num_rows) for shard in shards]
    return sum(total for total, _ in sums) / max(sum(rows for _, rows in sums), 1)


def _per_token(shard: pa.Table, name: str) -> np.ndarray:
    return shard[name].combine_chunks().flatten().to_numpy().astype(np.float64)
