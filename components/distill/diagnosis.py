"""A kept step made again: its loss, and where the first number appears that is not finite.

Values are followed in the order in which they are computed: parameters, the forward pass module by module, the loss of
each sequence, then the gradients from the loss backwards. Shapes: B sequences, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from reflux.components import models
from reflux.components.algorithms.not_finite import watching_outputs

from .config import DistillConfig
from .objective import DistillationLoss
from .replay import Replay
from .student import make_student


@dataclass(kw_only=True)
class Found:
    """Where numbers stop being finite; empty is nowhere."""

    loss_nats: float
    """Per scored token of the step, as it was when it failed."""
    parameters: list[str] = field(default_factory=list)
    activations: list[str] = field(default_factory=list)
    """In the order of the forward pass: module, sequence, position and token."""
    losses: list[str] = field(default_factory=list)
    """Sequences whose own loss is not finite."""
    gradients: list[str] = field(default_factory=list)
    """In the order of the backward pass."""


def diagnose(replay: Replay, student_path: Path, teacher_path: Path) -> Found:
    """Make the step of `replay` again, one sequence at a time, with the models that its configuration names."""
    tokenizer = models.load_tokenizer(student_path)
    student = make_student(replay.config, models.load_model(student_path), replay.policy)
    unknown = student.load_state_dict(replay.weights, strict=False).unexpected_keys
    if unknown:
        raise ValueError(f"replay: {len(unknown)} weights do not belong to {student_path.name}, e.g. {unknown[0]}")
    trained = {name: p for name, p in student.named_parameters() if name in replay.weights}
    for p in trained.values():
        p.requires_grad_(True)
    teacher = models.load_model(teacher_path)
    dtype = models.DTYPES[replay.compute_dtype]
    loss = DistillationLoss(student, teacher, tokenizer, _scored_with(replay), dtype)
    found = Found(loss_nats=0.0)
    for who, model in {"student": student, "teacher": teacher}.items():
        found.parameters += [f"{who}: {name}" for name, p in model.named_parameters() if not _finite(p)]
    tokens = sum(sequence.scored for sequence in replay.sequences)
    for number, sequence in enumerate(replay.sequences):
        words = [repr(tokenizer.decode([token])) for token in sequence.token_ids]
        with _watching(student, f"sequence {number}", words, found):
            value = loss([sequence], teacher_weight=replay.teacher_weight)
            if value.requires_grad:
                (value / max(1, tokens)).backward()
        found.loss_nats += value.item() / max(1, tokens)
        if not _finite(value):
            found.losses.append(f"sequence {number}: {value.item()} nats")
    found.gradients += [name for name, p in trained.items() if p.grad is not None and not _finite(p.grad)]
    return found


def _scored_with(replay: Replay) -> DistillConfig:
    """The configuration; where rollouts broke, only prompts are kept, which nobody drew: any divergence shows where."""
    undrawn = any(s.teacher is None and s.drawn_nats is None for s in replay.sequences)
    if undrawn and replay.config.needs_draws:
        return replace(replay.config, objective="forward_kl")
    return replay.config


@contextmanager
def _watching(student: Any, sequence: str, words: list[str], found: Found) -> Iterator[None]:
    """Within the block, the first module whose output is not finite is noted, and the first whose gradient is not."""
    seen = {"activations": len(found.activations), "gradients": len(found.gradients)}

    def note(kind: str, where: str, value_BTD: torch.Tensor) -> None:
        notes = getattr(found, kind)
        if len(notes) > seen[kind] or _finite(value_BTD):
            return
        position = int((~value_BTD[0].isfinite().all(-1)).nonzero()[0])
        notes.append(f"{where}, {sequence}, token {position} {words[position]}")

    def see(name: str, value_BTD: torch.Tensor) -> None:
        note("activations", f"output of {name}", value_BTD.detach())
        if value_BTD.requires_grad:
            value_BTD.register_hook(lambda grad: note("gradients", f"gradient at the output of {name}", grad))

    with watching_outputs(student, see):
        yield


def _finite(value: torch.Tensor) -> bool:
    return bool(value.isfinite().all())
