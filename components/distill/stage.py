"""Distil: train the student through its own low-bit forward on its rollouts and on the teacher's traces."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
from safetensors.torch import save_file

from reflux.components import models, processes, progress, schemas
from reflux.components.algorithms.k_norm_steps import finer_where_keys_are_long
from reflux.components.algorithms.low_bit import Scheme, profiled_table
from reflux.components.algorithms.policies import PositionTable
from reflux.components.algorithms.schedules import Phase, capped, phase_at
from reflux.components.artifacts import Artifact, Writer
from reflux.components.bundles import latent, policy_table
from reflux.components.equalized import equalized, is_equalized

from . import parallel, warm_policy
from .adapters import latent_weights
from .config import DistillConfig
from .dealing import Deck, RolloutBuffer
from .engines import ENGINES, Rolling
from .examples import Sequence, require_contract, require_usable, training_examples
from .gpu_memory import gpu_memory
from .key_norms import norms_of_keys
from .memory import need_of, require_memory
from .objective import DistillationLoss
from .own_answers import answering
from .start import find_start
from .student import device_of, make_student, scheme_of
from .trainer import Trainer
from .training import Watched, choose, train, validated
from .verified_answers import posed, verified


def run(
    config: DistillConfig, *, traces: Artifact, profile: Artifact, labels: Artifact, student: Writer
) -> dict[str, float]:
    """Write the trained master weights, the learned table and the history of training; return its summary."""
    student_path = student.source("student_uri")
    tokenizer = models.load_tokenizer(student_path)
    stored = traces.schema_metadata("traces")
    require_contract(stored, tokenizer, student.source_digest("teacher"))
    require_usable(config, stored["trace_store"], int(stored["top_k"]))
    require_shares(config, processes.started())
    remark = require_memory(need_of(config, student_path, student.source("teacher")), config)
    start = None
    if config.start_uri:
        start = find_start(student.source("start_uri"), scheme_of(config), equalized=is_equalized(profile))
    begun_policy = None if start is None else start.policy()
    needs_table = scheme_of(config).needs_policy and begun_policy is None
    if processes.is_first():
        print("\n".join([remark, *remarks(config, profiled_policy=needs_table)]), flush=True)
    examples, validation = _split(training_examples(traces, config.max_sequence_tokens), config.validation_traces)

    policy = begun_policy
    if needs_table:
        policy = profiled(profile, scheme_of(config), config.k_norm_power)
    device = device_of(config)
    base = equalized(models.load_model(student_path), profile)
    model = make_student(config, base, policy, start).to(device)
    teacher = models.load_model(student.source("teacher")).to(device)
    loss = DistillationLoss(model, teacher, tokenizer, config, models.compute_dtype(config.compute_dtype, device.type))
    if config.parallelism == "fsdp2" and processes.count() > 1:
        parallel.shard(model)
    phases = steps_of(config, has_policy=policy is not None)
    trainer = make_trainer(config, phases, model, tokenizer, loss, examples, _hard(labels), student_path)
    metrics: dict[str, float] = {}

    with tempfile.TemporaryDirectory() as scratch:

        def validate(name: str, when: str) -> None:
            if validation:
                metrics[name] = validated(trainer, validation, student, Path(scratch), when=when)

        validate("validation_loss_before_nats", "before training")
        watched = train(trainer, validation, tokenizer, student, Path(scratch))
        metrics |= warm_policy.settle(trainer)
        trainer.optimizer.state.clear()  # no step follows, and moments take as much as two students
        metrics["steps"] = float(trainer.step)
        validate("validation_loss_last_nats", "of the last weights")
        if config.ema_decay:
            with trainer.ema.exchanged(trainer.local()):
                validate("validation_loss_ema_nats", "of the averaged weights")
        if config.validate_every:
            metrics |= {
                "validation_loss_best_nats": watched.best.nats,
                "validation_best_step": float(watched.best.step),
            }
        choose(trainer, config.export, Path(scratch))
        with parallel.whole(model):
            if processes.is_first():
                _write(student, trainer, watched, Path(scratch))
    progress.publish(trainer.history[watched.published :])
    return metrics | {name: value for name, value in trainer.history[-1].values.items() if not name.endswith("_lr")}


def profiled(profile: Artifact, scheme: Scheme, k_norm_power: float = 0.0) -> PositionTable | None:
    """The table that profile_kv wrote, for the scheme's bits and finer where keys are long; None where the scheme needs
    none.
    """
    if not scheme.needs_policy:
        return None
    table = policy_table.decode(profile.file("policy_table.bin"))
    table = profiled_table(table, scheme, int(profile.config["activation_bits"]))
    return finer_where_keys_are_long(table, *norms_of_keys(profile), k_norm_power) if k_norm_power else table


def remarks(config: DistillConfig, *, profiled_policy: bool) -> list[str]:
    """What whoever starts the training should know of it, and is no error."""
    if profiled_policy and not config.warmup_steps:
        return [
            "distill.warmup_steps 0: the weights move before the position table has found its scales, which made "
            "published runs collapse within 50 steps; watch policy_gradient_norm and policy_saturated_share"
        ]
    return []


def steps_of(config: DistillConfig, *, has_policy: bool) -> list[Phase]:
    """The phases as they are made. ValueError if in some step nothing would move, or no step is validated that is asked
    to be.
    """
    phases = capped(schedule(config, has_policy=has_policy), config.max_steps)
    total = sum(phase.steps for phase in phases)
    if config.validate_every > total:
        raise ValueError(f"distill.validate_every {config.validate_every}: there are only {total} steps")
    return phases


def schedule(config: DistillConfig, *, has_policy: bool) -> list[Phase]:
    """The phases as configured, before any cap. ValueError if there is a step in which nothing would move."""
    warmup = Phase(
        name="warmup",
        steps=config.warmup_steps if has_policy else 0,  # without a table there is nothing to warm up
        student_lr=0.0,
        policy_lr=config.warmup_policy_lr,
        policy_every=1,
        last_layers=0,
        teacher_weight=(config.warmup_teacher_weight, config.warmup_teacher_weight),
    )
    joint = Phase(
        name="joint",
        steps=config.joint_steps,
        student_lr=config.joint_student_lr,
        policy_lr=config.joint_policy_lr,
        policy_every=config.joint_policy_every,
        last_layers=config.joint_last_layers,
        teacher_weight=(config.joint_teacher_weight, config.joint_teacher_weight_end),
        gradient_clip=config.joint_gradient_clip,
    )
    finetune = Phase(
        name="finetune",
        steps=config.finetune_steps,
        student_lr=config.finetune_student_lr,
        policy_lr=config.finetune_policy_lr,
        policy_every=config.finetune_policy_every,
        last_layers=-1,
        teacher_weight=(config.finetune_teacher_weight, config.finetune_teacher_weight),
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


def require_shares(config: DistillConfig, count: int) -> None:
    """ValueError if `count` processes do not each get as many sequences of a step as the others."""
    if config.batch_sequences % count:
        raise ValueError(
            f"distill.batch_sequences {config.batch_sequences}: must be a multiple of the {count} processes that share "
            "each step"
        )


def _split(examples: dict[str, Sequence], kept_back: int) -> tuple[dict[str, Sequence], dict[str, Sequence]]:
    """Training examples, and the first `kept_back` by trace id to validate on."""
    if len(examples) <= kept_back:
        raise ValueError(f"distill.validation_traces {kept_back}: there are only {len(examples)} training traces")
    items = [*examples.items()]
    return dict(items[kept_back:]), dict(items[:kept_back])


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
    student_path: Path,
) -> Trainer:
    """At step 0. `examples` are dealt by trace id, those in `hard` more often."""
    names = [name for name in examples for _ in range(config.hard_weight if name in hard else 1)]
    asked = names
    prompts = {name: example.token_ids[: example.first_scored] for name, example in examples.items()}
    per_prompt = config.sharpen_particles if config.minimises("sharpening") else 1
    answer = answering(config, loss.student, loss.teacher)
    if config.minimises("verifier"):
        problems, per_prompt = posed(config, tokenizer), config.group_answers
        asked, prompts = [*problems], {name: token_ids for name, (_, token_ids) in problems.items()}
        answer = verified(answer, problems, tokenizer, per_prompt)
    rolling = Rolling(
        student=model,
        path=student_path,
        eos_token_id=tokenizer.eos_token_id,
        vocab_size=len(tokenizer),
        slots=config.rollout_slots,
        longest=max(map(len, prompts.values())) + config.rollout_new_tokens,
    )
    engine = parallel.dealt(ENGINES[config.rollout_engine](rolling))
    answer = parallel.by_whole(model, answer)
    rollouts = RolloutBuffer(engine, answer, Deck(asked, config.seed + 1), prompts, config.seed, per_prompt=per_prompt)
    return Trainer(config, phases, model, loss, examples, Deck(names, config.seed), rollouts)


def _write(student: Writer, trainer: Trainer, watched: Watched, folder: Path) -> None:
    student.write_file("scheme.json", json.dumps(scheme_of(trainer.config).as_json(), sort_keys=True).encode())
    file = folder / latent.NAME
    weights = {name: value.contiguous() for name, value in latent_weights(trainer.student).items()}
    save_file(weights, file, metadata=latent.LATENT)
    student.write_file(latent.NAME, file)
    if trainer.policy:
        student.write_file("policy_table.bin", policy_table.encode(trainer.student.policy))
    phases = {point.step: phase_at(trainer.phases, point.step - 1)[0].name for point in trainer.history}
    rows = [
        {"step": point.step, "phase": phases[point.step], "metric": metric, "value": value}
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
    if (taken := gpu_memory(next(trainer.student.parameters()).device)) is not None:
        student.write_file("gpu_memory.json", json.dumps(taken).encode(), measured=True)
    if trainer.config.generations_every:  # a setting decides that it is there, so it is no part of the result
        answers = pa.Table.from_pylist(watched.generations, schemas.TRAINING_GENERATIONS)
        student.write_table("training_generations", answers, schemas.TRAINING_GENERATIONS, measured=True)
