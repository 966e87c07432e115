"""A table that has stopped learning says nothing: the loss goes on, and the run is lost. Here it is counted, and ended.

Published runs that skipped the warm-up collapsed within 50 steps: the policy's scales ran out of range, or no gradient
reached them any more. The first is a share that is watched (and an error where a scale leaves any sensible range,
policies.SCALE_RANGE); the second is a count of steps, kept in the history, so that a resumed run goes on counting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from reflux.components.progress import MetricPoint

NEAR_ZERO = 1e-9
"""Norm of the policy's gradient, nats a scored token for a change of its scales by a factor e, below which none of it
arrives: that of a table that learns is 1e-4 or more.
"""
STILL_STEPS = 20
"""Steps in a row without a gradient that end the run."""
USUAL_SCALES = (0.01, 10.0)
"""Published bounds of a policy's output; outlying sites and sinks of small models are beyond them and well."""


def policy_health(
    policy: Iterable[torch.nn.Parameter], scales: torch.Tensor, history: Sequence[MetricPoint]
) -> dict[str, float]:
    """Metrics of one step, from gradients before clipping: their norm, how many steps in a row it has been near zero,
    and the share of scales beyond the usual bounds. Nothing in a step in which the policy stands still on purpose.

    ValueError once the steps in a row are STILL_STEPS.
    """
    moving = [p for p in policy if p.requires_grad]
    if not moving:
        return {}
    norm = torch.nn.utils.get_total_norm([p.grad for p in moving if p.grad is not None]).item()
    before = next((p.values["policy_still_steps"] for p in reversed(history) if "policy_still_steps" in p.values), 0.0)
    still = before + 1 if norm < NEAR_ZERO else 0.0
    if still >= STILL_STEPS:
        raise ValueError(
            f"distill: no gradient has reached the position table for {STILL_STEPS} steps (norm {norm:.1g}): it has "
            "collapsed, or nothing that is minimised depends on it; start with a warm-up (warmup_steps), lower the "
            "policy's rates, and see that activation_bits are below 16"
        )
    low, high = USUAL_SCALES
    return {
        "policy_gradient_norm": norm,
        "policy_still_steps": still,
        "policy_saturated_share": ((scales < low) | (scales > high)).double().mean().item(),
    }
