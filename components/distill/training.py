"""The run through the schedule: checkpoints, validation, early stop, what people watch, and what is kept when it fails.

A checkpoint holds the trainer's state, what was seen beside it, and the best weights so far. After the last step there
is none: what is left takes less time than writing one.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from reflux.components import processes, progress
from reflux.components.algorithms.low_bit import frozen_weights
from reflux.components.algorithms.not_finite import first_not_finite
from reflux.components.algorithms.schedules import phase_at
from reflux.components.artifacts import Writer

from . import parallel, replay
from .examples import Sequence
from .generations import generations, show
from .trainer import NotFiniteError, Trainer
from .validation import Best, validation_loss

SHOWN = {
    "loss_nats": "loss", "kl_forward_nats": "KL", "kl_reverse_nats": "reverse KL", "student_entropy_nats": "entropy",
    "top_overlap": "overlap", "rollout_loop_rate": "loops", "rollout_budget_exhausted": "no end",
}  # fmt: skip
"""Metrics of the last step that stand beside the progress bar."""


@dataclass(kw_only=True)
class Watched:
    """What was seen of the training beside the metrics of its steps."""

    best: Best = field(default_factory=Best)
    generations: list[dict[str, Any]] = field(default_factory=list)
    published: int = 0
    """Steps whose points were published: once a checkpoint holds them, since MLflow would count them twice if they were
    made again.
    """


def train(
    trainer: Trainer, validation: Mapping[str, Sequence], tokenizer: Any, student: Writer, folder: Path
) -> Watched:
    """All steps of the schedule, from the last checkpoint if there is one. `folder` is for files in between; the best
    weights lie there at the end. FloatingPointError says where the step is kept that cannot be made.
    """
    config, watched = trainer.config, _resumed(trainer, student, folder)
    while trainer.step < trainer.total and not watched.best.is_stale(config.patience):
        _report(trainer.step, trainer.total, _note(trainer))
        try:
            trainer.advance()
            _look(trainer, watched, validation, tokenizer, student, folder)
        except NotFiniteError as error:
            raise kept(error, trainer, student, folder) from error
        if trainer.step % config.checkpoint_every == 0 and trainer.step < trainer.total:
            _save(trainer, watched, student, folder)
            progress.publish(trainer.history[watched.published :])
            watched.published = len(trainer.history)
    stale = trainer.step < trainer.total
    _report(trainer.step, trainer.step, f"no better validation since step {watched.best.step}" if stale else "")
    return watched


def _report(done: int, total: int, note: str) -> None:
    if processes.is_first():
        progress.report(done, total, "steps", note)


def kept(error: NotFiniteError, trainer: Trainer, student: Writer, folder: Path) -> FloatingPointError:
    """Keep what was not finite; the error that says where it began and how to look at it."""
    place = replay.keep(student, trainer, error, folder)
    return FloatingPointError(f"{error}{_began(trainer, error.sequences)}. It is kept: reflux replay {place}")


def _began(trainer: Trainer, sequences: Several[Sequence]) -> str:
    """Where the forward of student or teacher stops being finite, as the end of a sentence; "" if it never does."""
    for who, scored in {"student": trainer.loss.student, "teacher": trainer.loss.teacher}.items():
        with parallel.whole(trainer.student), frozen_weights(scored.model):
            for number, sequence in enumerate(sequences):
                place = first_not_finite(scored.model, partial(scored.hidden, [sequence]))
                if place is not None:
                    return f"; it begins in {place.module} of the {who}, sequence {number}, position {place.position}"
    return ""


def validated(
    trainer: Trainer, validation: Mapping[str, Sequence], student: Writer, folder: Path, *, when: str
) -> float:
    """Nats per scored token by the weights as they stand. FloatingPointError where that is not finite: these very
    weights are kept, the average if that is what is validated.
    """
    sequences = [*validation.values()]
    nats = validation_loss(trainer.loss, sequences, trainer.config.micro_batch_sequences)
    if not nats < float("inf"):
        error = NotFiniteError(f"distill: the validation loss {when} is {nats} nats a token", sequences)
        raise kept(error, trainer, student, folder)
    return nats


def choose(trainer: Trainer, export: str, folder: Path) -> None:
    """Make the weights of that name the student's: last, ema, or best."""
    if export == "ema":
        trainer.ema.copy_to(trainer.local())
    if export == "best":
        weights = torch.load(folder / _file("best", trainer), weights_only=True, map_location="cpu")
        for name, value in trainer.local().items():
            value.copy_(weights[name])


def _look(
    trainer: Trainer,
    watched: Watched,
    validation: Mapping[str, Sequence],
    tokenizer: Any,
    student: Writer,
    folder: Path,
) -> None:
    """What the step that was just made is looked at with: validation of the averaged weights, answers of the last."""
    config, step = trainer.config, trainer.step
    if config.validate_every and step % config.validate_every == 0:
        with trainer.ema.exchanged(trainer.local()):
            nats = validated(trainer, validation, student, folder, when=f"after step {step}")
            if watched.best.see(nats, step):
                torch.save(trainer.local(), folder / _file("best", trainer))
        trainer.history[-1].values["validation_loss_nats"] = nats
    if config.generations_every and step % config.generations_every == 0:
        asked = dict([*validation.items(), *trainer.traces.items()][: config.generation_prompts])
        with parallel.whole(trainer.student):
            try:
                rows = generations(
                    trainer.rollouts.engine, tokenizer, asked, step=step, max_new_tokens=config.rollout_new_tokens
                )
            except FloatingPointError as error:
                raise NotFiniteError(f"distill: answers after step {step}: {error}", [*asked.values()]) from error
        watched.generations += rows
        show(rows)


def _note(trainer: Trainer) -> str:
    last = trainer.history[-1].values if trainer.history else {}
    shown = [f"{word} {last[name]:.2f}" for name, word in SHOWN.items() if name in last]
    return ", ".join([phase_at(trainer.phases, trainer.step)[0].name, *shown])


def _file(kind: str, trainer: Trainer) -> str:
    """Its name in a checkpoint: of processes that hold the whole student one for all, of others one each."""
    if processes.count() == 1:
        return f"{kind}.pt"
    own = processes.rank() if parallel.is_sharded(trainer.student) else 0
    return f"{kind}-{own}-of-{processes.count()}.pt"


def _save(trainer: Trainer, watched: Watched, student: Writer, folder: Path) -> None:
    files = {}
    if processes.is_first() or parallel.is_sharded(trainer.student):
        seen = {"best": asdict(watched.best), "generations": watched.generations}
        torch.save({"trainer": trainer.state(), **seen}, folder / _file("state", trainer))
        files = {
            name: folder / name for kind in ("state", "best") if (folder / (name := _file(kind, trainer))).exists()
        }
    student.save_checkpoint(trainer.step, files)


def _resumed(trainer: Trainer, student: Writer, folder: Path) -> Watched:
    """The trainer as its last checkpoint left it. ValueError if that was made by another number of processes, which
    sum in another order.
    """
    names = {_file(kind, trainer) for kind in ("state", "best")}
    step = student.latest_checkpoint(folder, names.__contains__)
    if step is None:
        return Watched()
    file = folder / _file("state", trainer)
    if not file.exists():
        raise ValueError(
            f"distill: the checkpoint of step {step} was not made by {processes.count()} processes; start as many as "
            "before, since with others the result would be another"
        )
    state = torch.load(file, weights_only=True, map_location="cpu")
    trainer.restore(state["trainer"])
    progress.publish(trainer.history)
    return Watched(best=Best(**state["best"]), generations=state["generations"], published=len(trainer.history))
