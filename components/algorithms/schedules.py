"""The three-stage schedule: what is trained in which step, at which rate.

warm-up: the policy alone finds its scales; joint: the policy and the last layers; fine-tune: every decoder layer. The
phases' lengths and rates are data of the recipe. A cap on the total keeps the proportions, so that a capped run still
passes through all phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

PHASES = ("warmup", "joint", "finetune")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of optimizer steps with one set of trained parameters."""

    name: str
    steps: int
    student_lr: float
    policy_lr: float
    policy_every: int
    """The policy moves every so many steps."""
    last_layers: int
    """Decoder layers trained, counted from the last; -1 for all, 0 none."""
    teacher_weight: tuple[float, float] = (1.0, 1.0)
    """Share of the teacher in what is minimised on traces, at the first step and at the last."""
    gradient_clip: float = 0.0
    """Largest norm of the gradient; 0 is no other than in the other phases."""


def capped(phases: list[Phase], max_steps: int) -> list[Phase]:
    """The phases shortened in proportion to `max_steps` in all, each to one step at least while there are enough; 0
    leaves them as they are.
    """
    total = sum(phase.steps for phase in phases)
    if not max_steps or max_steps >= total:
        return phases
    ends = [round(sum(p.steps for p in phases[: i + 1]) * max_steps / total) for i in range(len(phases))]
    steps = [end - start for start, end in pairwise([0, *ends])]
    for i, phase in enumerate(phases):
        if phase.steps and not steps[i] and max(steps) > 1:
            steps[steps.index(max(steps))] -= 1
            steps[i] = 1
    return [replace(phase, steps=n) for phase, n in zip(phases, steps, strict=True)]


def phase_at(phases: list[Phase], step: int) -> tuple[Phase, int]:
    """The phase of optimizer step `step` (from 0) and the step within it."""
    within = step
    for phase in phases:
        if within < phase.steps:
            return phase, within
        within -= phase.steps
    raise ValueError(f"step {step} lies beyond the schedule")


def teacher_weight(phase: Phase, step: int) -> float:
    """At a step of the phase, from 0: linear between its ends."""
    first, last = phase.teacher_weight
    return first + (last - first) * step / max(1, phase.steps - 1)


def has_settled(values: Sequence[float], patience: int) -> bool:
    """Whether what should fall has stopped falling: the mean of the last `patience` values is no lower than that of as
    many before. Never for 0, nor before there are so many.
    """
    if not patience or len(values) < 2 * patience:
        return False
    last, before = values[-patience:], values[-2 * patience : -patience]
    return sum(last) >= sum(before)


def rate(step: int, steps: int, warmup_steps: int, final_share: float) -> float:
    """Factor on a phase's learning rate: linear rise over `warmup_steps`, then linear fall from 1 to `final_share` at
    its last step. Where that is the first one after the rise there is no time to fall: it is 1.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    falling = steps - 1 - warmup_steps
    left = (steps - 1 - step) / falling if falling > 0 else 1.0
    return final_share + (1 - final_share) * left
