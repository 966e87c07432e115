"""A finished run's folder with a real chain of six artifacts behind it, made by writers instead of by models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from reflux.components.artifacts import Artifact, Writer
from reflux.components.schemas import LATENCIES, TRAINING
from reflux.components.sources import resolve
from reflux.components.storage import Store
from reflux.pipelines import run, runs
from reflux.pipelines.store import stores

PARENTS: dict[str, dict[str, str]] = {
    "collect_traces": {},
    "profile_kv": {"traces": "collect_traces"},
    "ingest_labels": {"traces": "collect_traces"},
    "distill": {"traces": "collect_traces", "profile": "profile_kv", "labels": "ingest_labels"},
    "calibrate": {"student": "distill", "profile": "profile_kv", "traces": "collect_traces"},
    "evaluate": {"bundle": "calibrate", "student": "distill", "profile": "profile_kv", "traces": "collect_traces"},
}
ROW = {
    "perplexity": 41.5, "nll_heldout": 1.25, "pmr": 0.875, "memory_bytes": 70_000_000, "effective_bits": 4.25,
}  # fmt: skip
TIMES = {"latency_p50_ms": 12.5, "latency_p95_ms": 20.0, "latency_of": "simulated"}
KEY_FIELDS, SETTINGS = {"seed": 0}, {"workers": 1}
METRICS: dict[str, Any] = {
    "verdict": "pass",
    "table": [{"scheme": scheme, "role": "any", **ROW} for scheme in ("fp32", "w4a4_dual", "w4a4_distilled")],
    "gates": [
        {"meaning": "policy match rate", "value": 0.875, "comparison": ">=", "threshold": 0.7, "result": "pass"},
    ],
}  # fmt: skip


def make(data_dir: Path, *, name: str = "demo-1") -> Path:
    """RUN, its store a plain directory beside it. Every artifact has a table and a file."""
    ref = stores.StoreRef(kind="directory", uri=str((data_dir / "objects-of-runs").absolute()))
    store = Store.open(ref.uri)
    (data_dir / "prompts.jsonl").parent.mkdir(parents=True, exist_ok=True)
    (data_dir / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    made: dict[str, Artifact] = {}
    for stage, parents in PARENTS.items():
        made[stage] = _commit(store, data_dir, stage, {name: made[parent] for name, parent in parents.items()})
    folder = data_dir / "runs" / name
    folder.mkdir(parents=True)
    configs: dict[str, dict[str, Any]] = {stage: {**KEY_FIELDS, **SETTINGS} for stage in PARENTS}
    configs["collect_traces"]["prompts_uri"] = str(data_dir / "prompts.jsonl")
    configs["ingest_labels"]["labels_uri"] = ""
    record = runs.RunRecord(
        run=name, recipe="demo", store=ref, configs=configs, config_digest=runs.config_digest("demo", configs, ref),
        status="finished",
        artifacts={stage: {"key": artifact.key, "digest": artifact.digest} for stage, artifact in made.items()},
        root=made["evaluate"].digest, verdict="pass",
    )  # fmt: skip
    run.write_out(folder, store, record)
    runs.write(folder, record)
    return folder


def _commit(store: Store, data_dir: Path, stage: str, parents: dict[str, Artifact]) -> Artifact:
    uri = str(data_dir / "prompts.jsonl")
    sources = {"prompts_uri": resolve("prompts_uri", uri)} if stage == "collect_traces" else {}
    writer = Writer(
        store, stage=stage, version="1", key_fields=KEY_FIELDS, other_fields=SETTINGS, parents=parents,
        sources=sources,
    )  # fmt: skip
    rows: list[dict[str, Any]] = [{"step": 1, "phase": stage, "metric": "loss_nats", "value": 0.5}]
    writer.write_table("rows/00000", pa.Table.from_pylist(rows, schema=TRAINING), TRAINING)
    writer.write_file("times.json", b'{"seconds": 3}', measured=True)
    if stage == "profile_kv":
        writer.write_file("profile.html", b"<p>plots</p>", measured=True)
    if stage == "calibrate":
        writer.write_file("model.safetensors", bytes(range(256)))
    if stage == "evaluate":
        writer.write_file("metrics.json", json.dumps(METRICS).encode())
        times = [{"scheme": row["scheme"], **TIMES} for row in METRICS["table"]]
        writer.write_table("latencies", pa.Table.from_pylist(times, LATENCIES), LATENCIES, measured=True)
        writer.write_file("report.html", b"<p>table</p>")
    return writer.commit({"loss_nats": 0.5})
