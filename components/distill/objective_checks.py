"""Refused where a run is submitted: objectives that do not fit the sequences that they are minimised on, or the way in
which these are drawn (objectives.md, rule 4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .terms import ROLLOUTS, TRACES, require_place
from .verified_tasks import TASKS

if TYPE_CHECKING:
    from .config import DistillConfig

OF_DRAWS = ("sampled_reverse_kl", "verifier")
"""Objectives that weigh a token by the probability that it was drawn with."""


def check_objectives(config: DistillConfig) -> None:
    """ValueError names the field and what it does not go with."""
    rollout_terms = config.rollout_terms  # has to be readable even where there are no rollouts
    if config.on_policy_fraction > 0:
        require_place("objective", rollout_terms, ROLLOUTS)
    require_place("trace_objective" if config.trace_objective else "objective", config.trace_terms, TRACES)
    of_draws = [name for name in OF_DRAWS if config.minimises(name)]
    sharpened = config.minimises("sharpening")
    if sharpened and of_draws:
        raise ValueError(f"distill.objective: sharpening weighs its answers, which {of_draws[0]} takes as drawn")
    if (of_draws or sharpened) and config.score_prompts:
        raise ValueError(f"distill.score_prompts True: {config.objective} is over what the student wrote; set it false")
    if of_draws:
        _check_draws(config, of_draws[0])
    if sharpened:
        _check_particles(config)
    if config.verified_task not in TASKS:
        raise ValueError(f"distill.verified_task {config.verified_task!r}: allowed are {', '.join(TASKS)}")
    if config.minimises("verifier"):
        _check_groups(config)


def _check_draws(config: DistillConfig, name: str) -> None:
    if config.rollout_temperature == 0:
        raise ValueError(f"distill.rollout_temperature 0: {name} needs answers that were drawn")
    drawn_from = (config.rollout_temperature, config.rollout_top_p)
    if drawn_from != (1, 1) and config.off_distribution == "refuse":
        raise ValueError(
            f"distill.rollout_temperature, rollout_top_p {drawn_from}: {name} is biased unless both are 1; "
            "set them, or off_distribution to renormalise"
        )


def _check_particles(config: DistillConfig) -> None:
    drawn_from = (config.rollout_temperature, config.rollout_top_p)
    if drawn_from != (1, 1):
        raise ValueError(
            f"distill.rollout_temperature, rollout_top_p {drawn_from}: sharpening draws at sharpen_temperature, and a "
            "nucleus would take away support that its weights need; leave both at 1"
        )
    if config.rollout_batch % config.sharpen_particles:
        raise ValueError(
            f"distill.rollout_batch {config.rollout_batch}: must be a multiple of sharpen_particles, "
            f"{config.sharpen_particles}"
        )


def _check_groups(config: DistillConfig) -> None:
    if config.group_answers < 2:
        raise ValueError(f"distill.group_answers {config.group_answers}: an answer is compared with one other at least")
    if config.rollout_batch % config.group_answers:
        raise ValueError(
            f"distill.rollout_batch {config.rollout_batch}: must be a multiple of group_answers, {config.group_answers}"
        )
