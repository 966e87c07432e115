"""The stages before distill on the tiny model, for tests that need their artifacts and not their story."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage_writers import writer_for

from reflux.components.artifacts import Artifact
from reflux.components.collect_traces import stage as collect_traces
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.distill import stage as distill
from reflux.components.distill.config import DistillConfig
from reflux.components.ingest_labels import stage as ingest_labels
from reflux.components.ingest_labels.config import IngestLabelsConfig
from reflux.components.profile_kv import stage as profile_kv
from reflux.components.profile_kv.config import ProfileKvConfig
from reflux.components.storage import Store

PARENTS = ("traces", "profile", "labels")
HARD = "p3"
PROMPTS = [
    {"prompt_id": f"p{i}", "prompt": f"What is {i} and {'more ' * i}?"} for i in range(12)
]  # 0, 7, 9, 11 held out


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Artifacts of one store; prompt HARD is the only one that an expert found hard."""

    folder: Path
    model: Path
    traces: Artifact
    profile: Artifact
    labels: Artifact

    def training(self, **options: Any) -> DistillConfig:
        """Eight quick steps through all phases, with whatever a test changes."""
        small = {
            "warmup_steps": 2, "joint_steps": 2, "finetune_steps": 4, "joint_last_layers": 1, "joint_policy_every": 1,
            "finetune_student_lr": 1e-3, "rise_steps": 0, "batch_sequences": 4, "micro_batch_sequences": 4,
            "rollout_batch": 3, "rollout_new_tokens": 12, "validation_traces": 2, "ema_decay": 0.5,
            "weight_clip_lr": 1e-2,
        }  # fmt: skip
        return DistillConfig(teacher=str(self.model), student_uri=str(self.model), **small | options)

    def distilled(self, *, store: str = "", **options: Any) -> Artifact:
        config = self.training(**options)
        parents = {"traces": self.traces, "profile": self.profile, "labels": self.labels}
        writer = writer_for(self.folder / store, "distill", config, **parents)
        return writer.commit(distill.run(config, **parents, student=writer))


def make(folder: Path, model: Path, *, equalization_power: float = 0.0, **collecting: Any) -> Chain:
    """The first three stages; `collecting` are options of collect_traces."""
    prompts, labels_file = folder / "prompts.jsonl", folder / "labels.jsonl"
    prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    labels_file.write_text(json.dumps({"prompt_id": HARD, "step": 0, "annotator": "ann", "rating": 1}) + "\n")

    collect = CollectTracesConfig(teacher=str(model), prompts_uri=str(prompts), max_new_tokens=16, **collecting)
    writer = writer_for(folder, "collect_traces", collect)
    traces = writer.commit(collect_traces.run(collect, traces=writer))
    profiling = ProfileKvConfig(
        student_uri=str(model), cost_traces=1, cost_tokens=2, equalization_power=equalization_power
    )
    writer = writer_for(folder, "profile_kv", profiling, traces=traces)
    profile = writer.commit(profile_kv.run(profiling, traces=traces, profile=writer))
    ingest = IngestLabelsConfig(labels_uri=str(labels_file))
    writer = writer_for(folder, "ingest_labels", ingest, traces=traces)
    labels = writer.commit(ingest_labels.run(ingest, traces=traces, labels=writer))
    chain = Chain(folder=folder, model=model, traces=traces, profile=profile, labels=labels)
    for name in PARENTS:
        (folder / f"{name}.json").write_bytes(getattr(chain, name).bytes)
    (folder / "model.txt").write_text(str(model))
    return chain


def load(folder: Path) -> Chain:
    """The chain that another process made there."""
    store = Store.open(str(folder))
    parents = {name: Artifact.load(store, (folder / f"{name}.json").read_bytes()) for name in PARENTS}
    return Chain(folder=folder, model=Path((folder / "model.txt").read_text()), **parents)
