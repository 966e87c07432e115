"""One batch of prompts becomes one table: the teacher's answers and what it thought at every token of them.

Distributions come from the logits of generation itself, step by step; nothing at full vocabulary outlives its step.

Shapes: B rows being answered, V vocabulary, T response tokens, K kept entries.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from reflux.components.algorithms.key_tokens import Evidence, key_token_score
from reflux.components.algorithms.rollouts import Sampling, derive_seed, rollout
from reflux.components.algorithms.sparse_teacher import sparse_topk
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.collect_traces.prompts import Prompt
from reflux.components.collect_traces.steps import step_starts, token_pieces

PER_TOKEN = ("topk_token_ids", "topk_logprobs", "tail_logmass", "entropy_nats", "key_token_score")


def answer_table(
    model: Any,
    tokenizer: Any,
    prompts: list[Prompt],
    config: CollectTracesConfig,
    *,
    teacher_digest: str,
    schema: pa.Schema,
) -> pa.Table:
    """The rows of one shard, in the order of the prompts."""
    seen: list[list[tuple[Tensor, ...]]] = [[] for _ in prompts]

    def on_step(rows: list[int], logits_BV: Tensor) -> None:
        sparse = sparse_topk(logits_BV, config.top_k, vocab_size=len(tokenizer))
        evidence = Evidence(
            logits_NV=logits_BV, entropy_nats_N=sparse.entropy_nats_N, temperature=config.key_token_temperature
        )
        score_B = key_token_score(evidence, config.key_token_strategies, config.key_token_weights)
        kept = (sparse.token_ids_NK, sparse.logprobs_NK, sparse.tail_logmass_N, sparse.entropy_nats_N, score_B)
        for row, values in zip(rows, zip(*(column.cpu() for column in kept), strict=True), strict=True):
            seen[row].append(values)

    done = rollout(
        model,
        [prompt.token_ids for prompt in prompts],
        Sampling(temperature=config.temperature, top_p=config.top_p, max_new_tokens=config.max_new_tokens),
        seeds=[derive_seed(config.seed, prompt.prompt_id) for prompt in prompts],
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        vocab_size=len(tokenizer),
        on_step=on_step,
    )
    columns: dict[str, pa.Array] = {
        name: _ragged([torch.stack([values[i] for values in row]).numpy() for row in seen], schema.field(name).type)
        for i, name in enumerate(PER_TOKEN)
    }
    plain = [
        {
            "trace_id": trace_id(prompt, config, teacher_digest),
            "prompt_id": prompt.prompt_id,
            "dimension": prompt.dimension,
            "split": prompt.split,
            "prompt": prompt.text,
            "prompt_token_ids": prompt.token_ids,
            "response": tokenizer.decode(rolled.response_token_ids, skip_special_tokens=True),
            "response_token_ids": rolled.response_token_ids,
            "step_starts": step_starts(token_pieces(tokenizer, rolled.response_token_ids)),
            "stop_reason": rolled.stop_reason,
        }
        for prompt, rolled in zip(prompts, done, strict=True)
    ]
    for name in schema.names:
        if name not in columns:
            columns[name] = pa.array([row[name] for row in plain], type=schema.field(name).type)
    return pa.table([columns[name] for name in schema.names], schema=schema)


def trace_id(prompt: Prompt, config: CollectTracesConfig, teacher_digest: str) -> str:
    """The same for the same question put to the same teacher in the same way, whatever else is in the file."""
    contract = {
        "prompt_id": prompt.prompt_id,
        "prompt": prompt.text,
        "teacher": teacher_digest,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "max_new_tokens": config.max_new_tokens,
        "dtype": config.dtype,
        "seed": config.seed,
    }
    return hashlib.sha256(json.dumps(contract, sort_keys=True).encode()).hexdigest()


def _ragged(rows: list[np.ndarray], dtype: pa.DataType) -> pa.Array:
    """A list column from one array per row: [T] or [T, K], without a Python object per number."""
    offsets = pa.array(np.cumsum([0, *map(len, rows)]), type=pa.int32())
    flat = np.concatenate(rows)
    item = dtype.value_type
    if pa.types.is_fixed_size_list(item):
        numbers = pa.array(flat.reshape(-1).astype(_numpy_type(item.value_type)), type=item.value_type)
        values = pa.FixedSizeListArray.from_arrays(numbers, type=item)
    else:
        values = pa.array(flat.astype(_numpy_type(item)), type=item)
    return pa.ListArray.from_arrays(offsets, values, type=dtype)


def _numpy_type(dtype: pa.DataType) -> np.dtype:
    """pyarrow's own way to it, to_pandas_dtype, needs pandas, which the images do without."""
    return pa.nulls(0, dtype).to_numpy().dtype
