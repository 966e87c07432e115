"""Profile the student-to-be on the teacher's traces, and initialise its quantiser from what is seen."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import torch

from reflux.components import models, policy_table, progress, schemas
from reflux.components.algorithms.low_bit import decoder_layers, site_modules, watching_sites
from reflux.components.algorithms.rollouts import cache_argument
from reflux.components.artifacts import Artifact, Writer
from reflux.components.sequences import batched, padded

from .activations import ActivationWatch, activation_rows, position_table
from .config import ProfileKvConfig
from .kv_cache import KNorms, decode_costs

BIMODAL = 5 / 9  # Sarle's coefficient of a uniform distribution


def run(config: ProfileKvConfig, *, traces: Artifact, profile: Writer) -> dict[str, float]:
    """Write the position table, activation statistics, K norms and measured cache costs; return their summary."""
    rows = _training_rows(traces, config.profiled_traces)
    path = profile.source("student_uri")
    tokenizer, model = models.load_tokenizer(path), models.load_model(path)
    sequences = [(row["prompt_token_ids"] + row["response_token_ids"])[: config.max_sequence_tokens] for row in rows]

    watch = ActivationWatch(config.sample_tokens, len(sequences), config.seed)
    norms = KNorms(len(decoder_layers(model)), max(map(len, sequences)))
    with torch.no_grad(), watching_sites(model, watch.see):
        for done, batch in enumerate(batched(sequences, config.batch_traces)):
            input_BT, mask_BT, position_BT = padded(batch, tokenizer.pad_token_id or 0)
            watch.begin(mask_BT)
            output = model.model(input_BT, attention_mask=mask_BT, position_ids=position_BT, use_cache=True)
            norms.update(getattr(output, cache_argument(model)), mask_BT)
            progress.report(min((done + 1) * config.batch_traces, len(sequences)), len(sequences), "traces")
    policy = position_table(watch, list(site_modules(model)), config.activation_bits)
    activations = activation_rows(watch, policy, config.activation_bits)
    costs = _costs(model, rows[: config.cost_traces], config.cost_tokens)

    profile.write_file("policy_table.bin", policy_table.encode(policy))
    profile.write_table("activations", pa.Table.from_pylist(activations, schemas.ACTIVATIONS), schemas.ACTIVATIONS)
    profile.write_table("k_norms", pa.Table.from_pylist(norms.rows(), schemas.K_NORMS), schemas.K_NORMS)
    profile.write_table("kv_cost", pa.Table.from_pylist(costs, schemas.KV_COST), schemas.KV_COST, measured=True)
    return _summary(activations, costs)


def _training_rows(traces: Artifact, count: int) -> list[dict[str, Any]]:
    columns = ["trace_id", "split", "prompt_token_ids", "response_token_ids"]
    rows = [row for row in traces.table("traces", columns).to_pylist() if row["split"] == "train"]
    return sorted(rows, key=lambda row: row["trace_id"])[:count]


def _costs(model: Any, rows: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    return [
        {"trace_id": row["trace_id"], "position": position, "kv_bytes": held, "update_us": spent_us}
        for row in rows
        for position, held, spent_us in decode_costs(model, row["prompt_token_ids"], row["response_token_ids"][:tokens])
    ]


def _summary(activations: list[dict[str, Any]], costs: list[dict[str, Any]]) -> dict[str, float]:
    tokens = sum(row["tokens"] for row in activations)
    summary = {
        "outlier_share": sum(row["outlier_share"] * row["tokens"] for row in activations) / tokens,
        "bimodal_share": sum(row["tokens"] for row in activations if row["bimodality"] > BIMODAL) / tokens,
        "absmax": max(row["absmax"] for row in activations),
    }
    if costs:
        spent = sorted(row["update_us"] for row in costs)
        summary["kv_update_us_p50"] = spent[len(spent) // 2]
    return summary
