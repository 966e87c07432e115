"""A policy network's part in training: it moves in the warm-up alone, and then becomes part of the position table.

What follows the warm-up is trained, validated and exported with the table, which is what a bundle carries: nothing is
ever deployed that was trained beside something else. Shapes: S sites, P knots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from reflux.components.algorithms.low_bit import frozen_weights
from reflux.components.algorithms.tabulated_policy import corrections
from reflux.components.sequences import batched, padded

from . import parallel

if TYPE_CHECKING:
    from .trainer import Trainer

TABULATED_TRACES = 16
"""Training traces over which corrections are averaged, the first by trace_id."""


def network_of(student: Any) -> dict[str, torch.nn.Parameter]:
    """Parameters of the student's policy network by name; none without one."""
    network = getattr(student, "policy_network", None)
    return {} if network is None else {f"policy_network.{name}": p for name, p in network.named_parameters()}


def settle(trainer: Trainer) -> dict[str, float]:
    """The network's corrections go into the table, and the network goes; what the table could not hold of it, in nats
    of a scale. Nothing happens without a network. ValueError if it has learned nothing, or the table has saturated.
    """
    if not trainer.network:
        return {}
    student, config = trainer.student, trainer.config
    device = next(student.parameters()).device
    sequences = [trace.token_ids for trace in [*trainer.traces.values()][:TABULATED_TRACES]]
    batches = (padded(part, 0) for part in batched(sequences, config.micro_batch_sequences))
    on_device = ((ids.to(device), mask.to(device), position.to(device)) for ids, mask, position in batches)
    with parallel.whole(student), frozen_weights(student):
        found = corrections(student, on_device)
    name, mean_SP = "policy.log_main_SP", found.mean_SP.to(device)
    with torch.no_grad():
        trainer.policy[name].add_(mean_SP)
        if trainer.ema.average:
            trainer.ema.average[name].add_(mean_SP)
    drop(trainer)
    student.policy.check()
    return {"policy_network_unexplained_nats": found.unexplained_nats}


def drop(trainer: Trainer) -> None:
    """Go on with the table alone."""
    group = trainer.optimizer.param_groups[-1]
    for p in group["params"]:
        trainer.optimizer.state.pop(p, None)
    group["params"] = []
    for name in trainer.network:
        trainer.ema.average.pop(name, None)
    trainer.network, trainer.student.policy_network = {}, None
