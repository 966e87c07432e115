"""What a run left, finished or stopped: the artifacts of its stages, and of a training that is not done its last
checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from reflux.components import declare, models, sources
from reflux.components.algorithms.policies import PositionTable
from reflux.components.artifact_reader import artifact_folder
from reflux.components.artifacts import Artifact, Writer
from reflux.components.bundles import policy_table
from reflux.components.checkpoints import Checkpoints
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.distill.config import STAGE_VERSION, DistillConfig
from reflux.components.distill.stage import profiled
from reflux.components.distill.start import find_start
from reflux.components.distill.student import make_student, scheme_of
from reflux.components.equalized import equalized
from reflux.components.sources import Source
from reflux.components.storage import Store
from reflux.pipelines.doctor.finding import NothingToSeeError
from reflux.pipelines.runs import RunRecord

PARENTS = {"traces": "collect_traces", "profile": "profile_kv", "labels": "ingest_labels"}
"""Input of distill -> the stage that makes it."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Of one run."""

    made: dict[str, Artifact]
    """Stage -> its artifact, of those that are done."""
    collecting: CollectTracesConfig
    config: DistillConfig
    given: dict[str, Source]
    """Of distill: field -> source."""
    history: list[dict[str, float]] = field(default_factory=list)
    """Metrics of each optimizer step that is known."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """What was trained, as it stood at the end of that."""
    table: PositionTable | None = None
    """The position table there."""
    failed_step: str = ""
    """Where in the store a step is kept that could not be made."""

    def artifact(self, stage: str) -> Artifact:
        """NothingToSeeError if the run was stopped before that stage was done."""
        if stage not in self.made:
            raise NothingToSeeError(f"{stage} is not done")
        return self.made[stage]

    @property
    def begun_with(self) -> PositionTable | None:
        """The table of an earlier training, if it goes on from one."""
        if "start_uri" not in self.given:
            return None
        return find_start(self.given["start_uri"].path, scheme_of(self.config)).policy()

    @property
    def profiled(self) -> PositionTable | None:
        """The table before training; None where the scheme needs none."""
        if (table := self.begun_with) is not None:
            return table
        return profiled(self.artifact("profile_kv"), scheme_of(self.config), self.config.k_norm_power)

    @property
    def steps(self) -> list[dict[str, float]]:
        """The history. NothingToSeeError if none of it is known."""
        if not self.history:
            raise NothingToSeeError("no step of the training is known: it has not begun, or not reached a checkpoint")
        return self.history

    def token_ids(self, most: int) -> list[int]:
        """Of the first trace, prompt and answer, cut."""
        columns = ["prompt_token_ids", "response_token_ids"]
        row = next(self.artifact("collect_traces").batches("traces", columns)).slice(0, 1).to_pylist()[0]
        return [*row["prompt_token_ids"], *row["response_token_ids"]][:most]


def gather(record: RunRecord, store: Store, folder: Path) -> Evidence:
    """`folder` is for files in between. ValueError for a run whose configuration this version does not read."""
    made = {stage: Artifact.open(store, stage, entry["key"]) for stage, entry in record.artifacts.items()}
    config = declare.from_mapping(DistillConfig, record.configs["distill"])
    evidence = Evidence(
        made=made,
        collecting=declare.from_mapping(CollectTracesConfig, record.configs["collect_traces"]),
        config=config,
        given={name: sources.resolve(name, uri) for name, uri in declare.source_fields(config).items()},
    )
    if "distill" in made:
        return _finished(evidence, made["distill"], folder)
    return _stopped(evidence, store, folder) if made.keys() >= set(PARENTS.values()) else evidence


def _finished(evidence: Evidence, student: Artifact, folder: Path) -> Evidence:
    """From the student, in which adapters are merged into weights and a policy network into the table."""
    steps: dict[int, dict[str, float]] = {}
    for row in student.table("training", ["step", "metric", "value"]).to_pylist():
        steps.setdefault(row["step"], {})[row["metric"]] = row["value"]
    student.download("latent.safetensors", folder / "latent.safetensors")
    needs = scheme_of(evidence.config).needs_policy
    return replace(
        evidence,
        config=replace(evidence.config, lora_rank=0, lora_targets=[], lora_rank_stabilised=False, policy="lookup"),
        history=[values for _, values in sorted(steps.items())],
        weights=load_file(folder / "latent.safetensors"),
        table=policy_table.decode(student.file("policy_table.bin")) if needs else None,
    )


def _stopped(evidence: Evidence, store: Store, folder: Path) -> Evidence:
    """From the last checkpoint, which lies under the key that the artifact would have had. A policy network is gone
    once the table has become what it knew.
    """
    config = evidence.config
    key = Writer(
        store,
        stage="distill",
        version=STAGE_VERSION,
        key_fields=declare.hashed_fields(config),
        other_fields=declare.other_fields(config),
        parents={name: evidence.made[stage] for name, stage in PARENTS.items()},
        sources=evidence.given,
    ).key
    place = artifact_folder("distill", key)
    failures = f"{place}/failures"
    if Checkpoints(store, failures).latest(folder / "failures") is not None:
        evidence = replace(evidence, failed_step=failures)
    Checkpoints(store, f"{place}/checkpoints").latest(folder, "state.pt".__eq__)
    if not (folder / "state.pt").exists():
        return evidence
    state: dict[str, Any] = torch.load(folder / "state.pt", weights_only=True, map_location="cpu")["trainer"]
    table = evidence.profiled
    if table is not None:
        with torch.no_grad():
            table.log_main_SP.copy_(state["trained"]["policy.log_main_SP"])
    reads = any(name.startswith("policy_network.") for name in state["trained"])
    return replace(
        evidence,
        config=evidence.config if reads else replace(evidence.config, policy="lookup"),
        history=[values for _, _, values in state["history"]],
        weights={name: value for name, value in state["trained"].items() if not name.startswith("policy.")},
        table=table,
    )


def student_of(evidence: Evidence) -> Any:
    """The student as training left it, under its scheme; as it was before where no step is known. In eval mode."""
    table = evidence.table if evidence.table is not None else evidence.profiled
    base = equalized(models.load_model(evidence.given["student_uri"].path), evidence.artifact("profile_kv"))
    model = make_student(evidence.config, base, table)
    model.load_state_dict(evidence.weights, strict=False)
    return model.eval().requires_grad_(False)
