"""Third look: is the policy alive? Scales within bounds, gradients that move them, a warm-up before weights move."""

from __future__ import annotations

import torch

from reflux.components.algorithms.policies import SCALE_RANGE, PositionTable
from reflux.components.distill.guard import NEAR_ZERO, USUAL_SCALES
from reflux.pipelines.doctor.evidence import Evidence
from reflux.pipelines.doctor.finding import Finding, NothingToSeeError

LEAST_MOVEMENT = 0.01
"""Of the way that rates alone allow: AdamW goes about a rate's length in a step, whatever the gradient's length."""
NO_GRADIENT = (
    "its gradient is near zero: are sites rounded (the check `rounding`), does what is minimised depend on it, was "
    "there a warm-up?"
)
NO_TABLE = "the scheme has no position table"


def saturation(trained: PositionTable | None, profiled: PositionTable | None) -> Finding:
    """Has a main scale gone where it rounds everything to one code? Some models' first positions need scales beyond the
    usual ones, so it is asked which of them training has taken there.
    """
    if trained is None or profiled is None:
        raise NothingToSeeError(NO_TABLE)
    now_SP, before_SP = trained.scales()[..., 0], profiled.scales()[..., 0]
    fix = "lower the policy's rates, or profile longer traces"
    if (lost_SP := ~_within(now_SP, SCALE_RANGE)).any():
        found = f"main scale of {_place(trained, lost_SP)}, allowed is {SCALE_RANGE[0]:g} to {SCALE_RANGE[1]:g}"
        return Finding(check="saturation", status="fail", found=found, fix=fix)
    outside_SP = ~_within(now_SP, USUAL_SCALES)
    left_SP = outside_SP & _within(before_SP, USUAL_SCALES)
    low, high = USUAL_SCALES
    if left_SP.any():
        found = f"training took {int(left_SP.sum())} main scales beyond {low:g} to {high:g}: {_place(trained, left_SP)}"
        return Finding(check="saturation", status="warn", found=found, fix=fix)
    found = f"{now_SP.numel()} main scales from {now_SP.min():.3g} to {now_SP.max():.3g}"
    if outside_SP.any():
        found += f"; {int(outside_SP.sum())} beyond {low:g} to {high:g}, as they were before training"
    return Finding(check="saturation", status="ok", found=found)


def _within(scale_SP: torch.Tensor, bounds: tuple[float, float]) -> torch.Tensor:
    return (scale_SP >= bounds[0]) & (scale_SP <= bounds[1])  # NaN is in none


def _place(table: PositionTable, which_SP: torch.Tensor) -> str:
    s, p = which_SP.nonzero()[0].tolist()
    return f"{table.sites[s]} at position {table.knots[p]} is {table.scales()[s, p, 0]:.3g}"


def movement(evidence: Evidence) -> Finding:
    """Does its gradient move the table? One near zero leaves it where the profile put it."""
    way = sum(step["policy_lr"] for step in evidence.steps)
    trained, profiled = evidence.table, evidence.profiled
    if profiled is None or trained is None:
        raise NothingToSeeError(NO_TABLE)
    norms = [step["policy_gradient_norm"] for step in evidence.steps if "policy_gradient_norm" in step]
    if norms and norms[-1] < NEAR_ZERO:
        found = f"its gradient had norm {norms[-1]:.1g} when it moved last, and {max(norms):.1g} at most"
        return Finding(check="movement", status="warn", found=found, fix=NO_GRADIENT)
    if not way:
        fix = "distill.warmup_policy_lr, joint_policy_lr, finetune_policy_lr"
        return Finding(check="movement", status="warn", found="its rate was 0 in every step, the table stands", fix=fix)
    if evidence.config.export == "ema" and "distill" in evidence.made:  # an average follows with a delay
        way *= 1 - evidence.config.ema_decay ** len(evidence.history)
    before_SP, now_SP = (table.scales()[..., 0].log() for table in (profiled, trained))
    moved = (now_SP - before_SP).abs().max().item()
    found = f"a main scale moved by up to {moved:.2%} in {len(evidence.history)} steps, rates allow for {way:.2%}"
    if moved < LEAST_MOVEMENT * way:
        return Finding(check="movement", status="warn", found=found, fix=NO_GRADIENT)
    return Finding(check="movement", status="ok", found=found)


def warmup(evidence: Evidence) -> Finding:
    """Was the table warmed up before weights moved with it?"""
    if evidence.profiled is None:
        raise NothingToSeeError(NO_TABLE)
    steps = evidence.config.warmup_steps
    if evidence.begun_with is not None:
        return Finding(check="warm-up", status="ok", found="it goes on from an earlier training's table")
    if steps:
        return Finding(check="warm-up", status="ok", found=f"{steps} steps are asked for the table alone")
    fix = "distill.warmup_steps: without them policies were seen to collapse within 50 steps"
    return Finding(
        check="warm-up", status="warn", found="none: table and weights move together from the start", fix=fix
    )
