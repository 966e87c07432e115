"""What the tests of stores and artifacts run in processes of their own, so that they can race and be killed."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import pyarrow as pa

from reflux.components.artifacts import Artifact, Writer
from reflux.components.schemas import TRAINING, TRAINING_TIMES
from reflux.components.storage import S3Settings, Store

SHARDS = 5
WEIGHTS = bytes(range(256)) * 100


def create(uri: str, settings: S3Settings, key: str, n: int) -> bool:
    """Create an object whose content says who did."""
    return Store.open(uri, settings).create(key, str(n).encode())


def writer(
    store: Store, *, stage: str = "distill", lr: float = 0.5, parents: dict[str, Artifact] | None = None
) -> Writer:
    """The output of a small stage."""
    return Writer(
        store, stage=stage, version="1", key_fields={"lr": lr}, other_fields={}, parents=parents or {}, sources={}
    )


def training_rows(step: int) -> pa.Table:
    """The rows that the small stage writes into its shard of one step."""
    rows = [{"step": step, "phase": "joint", "metric": f"metric_{n}", "value": step * 100 + n / 7} for n in range(50)]
    return pa.Table.from_pylist(rows, schema=TRAINING)


def work(output: Writer, *, pause_s: float = 0.0) -> list[int]:
    """A small stage: a shard and a checkpoint per step, then times and weights. The steps that it really computed."""
    with tempfile.TemporaryDirectory() as folder:
        output.latest_checkpoint(Path(folder))
        state = Path(folder, "state.json")
        computed = json.loads(state.read_text()) if state.exists() else []
        mine = []
        for step in range(SHARDS):
            if output.done(f"training/{step:05d}"):
                continue
            output.write_table(f"training/{step:05d}", training_rows(step), TRAINING.with_metadata({"tokenizer": "t"}))
            mine.append(step)
            state.write_text(json.dumps(computed + mine))
            output.save_checkpoint(step, {"state.json": state})
            time.sleep(pause_s)
    now = [{"step": 0, "time_ms": time.time_ns() // 1_000_000, "seconds": time.perf_counter()}]
    output.write_table(
        "training_times", pa.Table.from_pylist(now, schema=TRAINING_TIMES), TRAINING_TIMES, measured=True
    )
    output.write_file("model.safetensors", WEIGHTS)
    return mine


def work_and_commit(uri: str, settings: S3Settings, pause_s: float, mark: str) -> tuple[list[int], str, str]:
    """The small stage in its own process; a mark makes its result differ. Its steps, the artifact."""
    output = writer(Store.open(uri, settings))
    computed = work(output, pause_s=pause_s)
    if mark:
        output.write_file("mark.txt", mark.encode())
    artifact = output.commit({"loss": 0.25})
    return computed, artifact.digest, artifact.bytes.decode()
