"""A shard of traces and what lies beside it: one table of each kind for the same answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from reflux.components import captured_schemas, models
from reflux.components.collect_traces.answers import Answer, answer_table, trace_id
from reflux.components.collect_traces.captured_tables import attention_table, state_table
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.schemas import TRACE_STORES

CAPTURED = {"states": state_table, "attention": attention_table}


def shard_schemas(
    config: CollectTracesConfig, teacher: Path, vocab_size: int, provenance: Mapping[str, str]
) -> dict[str, pa.Schema]:
    """Kind of table -> its schema, for the kinds that the configuration asks for."""
    kinds = {"traces": TRACE_STORES[config.trace_store](config.top_k, vocab_size)}
    if config.state_layers:
        kinds["states"] = captured_schemas.kv_states(*models.kv_shape(teacher), config.state_pooling)
    if config.attention_layers:
        kinds["attention"] = captured_schemas.attention(config.attention_top)
    return {kind: schema.with_metadata(dict(provenance)) for kind, schema in kinds.items()}


def shard_tables(
    answers: Sequence[Answer], tokenizer: Any, config: CollectTracesConfig, schemas: Mapping[str, pa.Schema]
) -> dict[str, pa.Table]:
    """Kind of table -> its rows for these answers."""
    tables = {"traces": answer_table(answers, tokenizer, config, schemas["traces"])}
    captured = [
        (trace_id(answer.prompt, config, answer.teacher_id), answer.captured)
        for answer in answers
        if answer.captured is not None
    ]
    return tables | {kind: CAPTURED[kind](captured, schemas[kind]) for kind in CAPTURED if kind in schemas}
