"""What a teacher said to one prompt, whoever it was and wherever it ran, and the table that such answers become.

Teachers (`teachers/`) make `Answer`s; everything after them, up to the bytes of a shard, reads nothing else.

Shapes: T response tokens, K kept entries.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pyarrow as pa
from torch import Tensor

from reflux.components.algorithms.loops import ends_in_loop
from reflux.components.algorithms.sampled_teacher import SampledTeacher
from reflux.components.algorithms.sparse_teacher import SparseTeacher
from reflux.components.collect_traces.captured import Captured
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.collect_traces.distribution_columns import ragged, sampled_columns, topk_columns
from reflux.components.collect_traces.prompts import Prompt
from reflux.components.collect_traces.steps import step_starts, token_pieces


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One teacher's answer to one prompt; tensors are on the CPU."""

    prompt: Prompt
    teacher_id: str
    response_token_ids: list[int]
    """T of them, with the closing EOS where the teacher wrote one."""
    stop_reason: str
    """"eos", "length", or "stop" where a server ended the answer for a reason of its own."""
    sparse: SparseTeacher
    """N = T. Its entropy is that of the whole distribution, or of the K + 1 buckets if `Teacher.entropy_of` says so."""
    key_token_score_T: Tensor
    sampled: SampledTeacher | None = None
    """N = T draws, where the trace store is made of them."""
    captured: Captured | None = None
    """States and attention, where the configuration asks for them and the teacher can give them."""


def answer_table(answers: Sequence[Answer], tokenizer: Any, config: CollectTracesConfig, schema: pa.Schema) -> pa.Table:
    """The rows of one shard, in the order of the answers."""
    columns = {
        "entropy_nats": ragged([answer.sparse.entropy_nats_N for answer in answers], schema.field("entropy_nats").type),
        "key_token_score": ragged(
            [answer.key_token_score_T for answer in answers], schema.field("key_token_score").type
        ),
    }
    if config.trace_store == "topk":
        columns |= topk_columns([answer.sparse for answer in answers], schema)
    else:
        columns |= sampled_columns([answer.sampled for answer in answers if answer.sampled is not None], schema)
    pieces = [token_pieces(tokenizer, answer.response_token_ids) for answer in answers]
    plain = [
        {
            "trace_id": trace_id(answer.prompt, config, answer.teacher_id),
            "prompt_id": answer.prompt.prompt_id,
            "teacher_id": answer.teacher_id,
            "dimension": answer.prompt.dimension,
            "split": answer.prompt.split,
            "prompt": answer.prompt.text,
            "language": answer.prompt.language,
            "language_confidence": answer.prompt.language_confidence,
            "entity_count": answer.prompt.entity_count,
            "prompt_token_ids": answer.prompt.token_ids,
            "anchor_spans": answer.prompt.anchors,
            "response": "".join(texts),
            "response_token_ids": answer.response_token_ids,
            "response_char_ends": list(accumulate(map(len, texts))),
            "step_starts": step_starts(texts),
            "stop_reason": answer.stop_reason,
            "ends_in_loop": ends_in_loop(answer.response_token_ids),
        }
        for answer, texts in zip(answers, pieces, strict=True)
    ]
    for name in schema.names:
        if name not in columns:
            columns[name] = pa.array([row[name] for row in plain], type=schema.field(name).type)
    return pa.table([columns[name] for name in schema.names], schema=schema)


def trace_id(prompt: Prompt, config: CollectTracesConfig, teacher_id: str) -> str:
    """The same for the same question put to the same teacher in the same way, whatever else is in the file."""
    contract = {
        "prompt_id": prompt.prompt_id,
        "prompt": prompt.text,
        "teacher": teacher_id,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "max_new_tokens": config.max_new_tokens,
        "dtype": config.dtype,
        "seed": config.seed,
    }
    return hashlib.sha256(json.dumps(contract, sort_keys=True).encode()).hexdigest()
