"""Distil: train the student through its own low-bit forward on its rollouts and on the teacher's traces."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from safetensors.torch import save_file

from reflux.components import models, policy_table, progress, schemas
from reflux.components.algorithms.low_bit import Scheme, apply_scheme, frozen_weights
from reflux.components.algorithms.rollouts import Sampling
from reflux.components.algorithms.schedules import Phase, capped, phase_at
from reflux.components.artifacts import Artifact, Writer

from .config import DistillConfig
from .dealing import Deck, RolloutBuffer
from .examples import Sequence, require_contract, require_usable, training_examples
from .objective import DistillationLoss
from .trainer import Trainer

LATENT = {"checkpoint": "latent"}
"""Marks master weights, which are not what is deployed: calibrate accepts only these, bundle.py refuses them."""
_STATE = "state.pt"


def run(
    config: DistillConfig, *, traces: Artifact, profile: Artifact, labels: Artifact, student: Writer
) -> dict[str, float]:
    """Write the trained master weights, the learned table and the history of training; return its summary."""
    student_path = student.source("student_uri")
    tokenizer = models.load_tokenizer(student_path)
    stored = traces.schema_metadata("traces")
    require_contract(stored, tokenizer, student.source_digest("teacher"))
    require_usable(config, stored["trace_store"], int(stored["top_k"]))
    examples, validation = _split(training_examples(traces, config.max_sequence_tokens), config.validation_traces)

    scheme = scheme_of(config)
    policy = policy_table.decode(profile.file("policy_table.bin")) if scheme.needs_policy else None
    model = apply_scheme(models.load_model(student_path), scheme, policy)
    teacher = models.load_model(student.source("teacher"))
    dtype = models.compute_dtype(config.compute_dtype)
    loss = DistillationLoss(model, teacher, tokenizer, config.objective, config.beta, dtype)
    phases = capped(schedule(config, has_policy=policy is not None), config.max_steps)
    trainer = make_trainer(config, phases, model, tokenizer, loss, examples, _hard(labels))
    before = _validation_loss(loss, model, validation, config)
    published = _train(trainer, phases, student, config)

    metrics = {"validation_loss_before_nats": before, "steps": float(trainer.step)}
    metrics["validation_loss_last_nats"] = _validation_loss(loss, model, validation, config)
    last = {name: p.detach().clone() for name, p in trainer.trained().items()} if config.export == "last" else {}
    trainer.ema.copy_to(trainer.trained())
    metrics["validation_loss_ema_nats"] = _validation_loss(loss, model, validation, config)
    with torch.no_grad():
        for name, value in last.items():
            trainer.trained()[name].copy_(value)
    _write(student, trainer, phases, scheme)
    progress.publish(trainer.history[published:])
    return metrics | {name: value for name, value in trainer.history[-1].values.items() if not name.endswith("_lr")}


def scheme_of(config: DistillConfig) -> Scheme:
    """The quantiser that the configuration describes."""
    return Scheme(
        weight_bits=config.weight_bits,
        group_size=config.group_size,
        activation_bits=config.activation_bits,
        activation=config.activation,
    )


def schedule(config: DistillConfig, *, has_policy: bool) -> list[Phase]:
    """The phases as configured, before any cap. ValueError if there is a step in which nothing would move."""
    warmup = Phase(
        name="warmup",
        steps=config.warmup_steps if has_policy else 0,  # without a table there is nothing to warm up
        student_lr=0.0,
        policy_lr=config.warmup_policy_lr,
        policy_every=1,
        last_layers=0,
    )
    joint = Phase(
        name="joint",
        steps=config.joint_steps,
        student_lr=config.joint_student_lr,
        policy_lr=config.joint_policy_lr,
        policy_every=config.joint_policy_every,
        last_layers=config.joint_last_layers,
    )
    finetune = Phase(
        name="finetune",
        steps=config.finetune_steps,
        student_lr=config.finetune_student_lr,
        policy_lr=config.finetune_policy_lr,
        policy_every=config.finetune_policy_every,
        last_layers=-1,
    )
    phases = [warmup, joint, finetune]
    if not any(phase.steps for phase in phases):
        raise ValueError(
            "distill.warmup_steps: without a position table there is no warm-up, and no other step is asked"
        )
    for phase in (phase for phase in phases if phase.steps):
        weights_move = phase.student_lr > 0 and phase.last_layers != 0
        if not weights_move and not (has_policy and phase.policy_lr > 0 and phase.policy_every == 1):
            raise ValueError(f"distill: in some steps of the {phase.name} phase neither weights nor table would move")
    return phases


def _split(examples: dict[str, Sequence], kept_back: int) -> tuple[dict[str, Sequence], list[Sequence]]:
    """Training examples, and the first `kept_back` by trace id to validate on."""
    if len(examples) <= kept_back:
        raise ValueError(f"distill.validation_traces {kept_back}: there are only {len(examples)} training traces")
    names = list(examples)
    return {name: examples[name] for name in names[kept_back:]}, [examples[name] for name in names[:kept_back]]


def _hard(labels: Artifact) -> set[str]:
    return {row["trace_id"] for row in labels.table("hard_samples", ["trace_id", "hard"]).to_pylist() if row["hard"]}


def make_trainer(
    config: DistillConfig,
    phases: list[Phase],
    model: Any,
    tokenizer: Any,
    loss: DistillationLoss,
    examples: dict[str, Sequence],
    hard: set[str],
) -> Trainer:
    """At step 0. `examples` are dealt by trace id, those in `hard` more often."""
    names = [name for name in examples for _ in range(config.hard_weight if name in hard else 1)]
    prompts = {name: example.token_ids[: example.first_scored] for name, example in examples.items()}
    sampling = Sampling(
        temperature=config.rollout_temperature, top_p=config.rollout_top_p, max_new_tokens=config.rollout_new_tokens
    )
    rollouts = RolloutBuffer(model, tokenizer, Deck(names, config.seed + 1), prompts, sampling, config.seed)
    return Trainer(config, phases, model, loss, examples, Deck(names, config.seed), rollouts)


def _train(trainer: Trainer, phases: list[Phase], student: Writer, config: DistillConfig) -> int:
    """All steps of the schedule, from the last checkpoint if there is one. Points are published once a checkpoint holds
    them, since MLflow would count them twice if they were made again; returns how many were. After the last step there
    is no checkpoint: what is left takes less time than writing one.
    """
    total = sum(phase.steps for phase in phases)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / _STATE
        if student.latest_checkpoint(Path(folder)) is not None:
            trainer.restore(torch.load(file, weights_only=True))
            progress.publish(trainer.history)
        published = len(trainer.history)
        while trainer.step < total:
            progress.report(trainer.step, total, "steps", phase_at(phases, trainer.step)[0].name)
            trainer.advance()
            if trainer.step % config.checkpoint_every == 0 and trainer.step < total:
                torch.save(trainer.state(), file)
                student.save_checkpoint(trainer.step, {_STATE: file})
                progress.publish(trainer.history[published:])
                published = len(trainer.history)
        progress.report(total, total, "steps")
    return published


@torch.no_grad()
def _validation_loss(loss: DistillationLoss, model: Any, sequences: list[Sequence], config: DistillConfig) -> float:
    """Nats per token on the traces kept back."""
    tokens = sum(sequence.scored for sequence in sequences)
    size = config.micro_batch_sequences
    with frozen_weights(model):
        parts = [loss(sequences[i : i + size]).item() for i in range(0, len(sequences), size)]
    return sum(parts) / tokens if tokens else 0.0


def _write(student: Writer, trainer: Trainer, phases: list[Phase], scheme: Scheme) -> None:
    student.write_file("scheme.json", json.dumps(asdict(scheme), sort_keys=True).encode())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "latent.safetensors"
        save_file({name: p.detach().contiguous() for name, p in trainer.weights.items()}, file, metadata=LATENT)
        student.write_file("latent.safetensors", file)
    if trainer.policy:
        student.write_file("policy_table.bin", policy_table.encode(trainer.student.policy))
    rows = [
        {"step": point.step, "phase": phase_at(phases, point.step - 1)[0].name, "metric": metric, "value": value}
        for point in trainer.history
        for metric, value in point.values.items()
    ]
    times = [
        {"step": point.step, "time_ms": point.time_ms, "seconds": seconds}
        for point, seconds in zip(trainer.history, trainer.seconds, strict=True)
    ]
    student.write_table("training", pa.Table.from_pylist(rows, schemas.TRAINING), schemas.TRAINING)
    student.write_table(
        "training_times", pa.Table.from_pylist(times, schemas.TRAINING_TIMES), schemas.TRAINING_TIMES, measured=True
    )
