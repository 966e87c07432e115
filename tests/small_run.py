"""A run that is small in every respect: its configuration, prompts and labels, for tests that run all six stages."""

from __future__ import annotations

import json
from pathlib import Path

PROMPTS = 48
SMALL = {
    "collect_traces": {"max_new_tokens": 24, "batch_size": 4, "top_k": 8},
    "profile_kv": {"profiled_traces": 4, "max_sequence_tokens": 96, "cost_traces": 1, "cost_tokens": 4},
    "distill": {
        "max_steps": 12, "batch_sequences": 4, "micro_batch_sequences": 2, "max_sequence_tokens": 96, "group_size": 16,
        "rollout_batch": 4, "rollout_new_tokens": 8, "validation_traces": 2, "checkpoint_every": 1,
    },
    "calibrate": {"check_traces": 2},
    "evaluate": {
        "windows": 2, "window_tokens": 64, "heldout_traces": 3, "batch_traces": 2, "generations": 1,
        "generation_tokens": 6, "latency_tokens": 20, "min_gap_closed_heldout": 0.0, "min_gap_closed_text": 0.0,
        "max_perplexity_ratio": 0.0, "min_pmr": 0.0,
    },
}  # fmt: skip


def write(folder: Path) -> None:
    """prompts.jsonl, labels.csv and small.json, the configuration."""
    rows = [{"prompt_id": f"p{n}", "prompt": f"Run python3 to add {n} and {n}."} for n in range(PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    labels = [f"p{n},0,{annotator},{1 + n % 5}" for n in range(6) for annotator in ("ann", "bob")]
    (folder / "labels.csv").write_text("\n".join(["prompt_id,step,annotator,rating", *labels]))
    (folder / "small.json").write_text(json.dumps(SMALL))
