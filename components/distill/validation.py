"""How far the student is from the traces that were kept back, and when that was best."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass

import torch

from reflux.components import processes
from reflux.components.algorithms.low_bit import frozen_weights
from reflux.components.sequences import batched

from . import parallel
from .examples import Sequence
from .objective import DistillationLoss


@torch.no_grad()
def validation_loss(loss: DistillationLoss, sequences: Several[Sequence], at_once: int) -> float:
    """Nats per scored token, `at_once` sequences a forward; 0 without sequences."""
    tokens = sum(sequence.scored for sequence in sequences)
    student = loss.student.model
    with parallel.whole(student), frozen_weights(student):
        own = sum(loss(batch).item() for batch in batched(processes.share(sequences), at_once))
    return sum(processes.gathered(own)) / tokens if tokens else 0.0


@dataclass(kw_only=True)
class Best:
    """The best validation so far; part of every checkpoint."""

    nats: float = float("inf")
    step: int = 0
    since: int = 0
    """Validations after it, none of them better."""

    def see(self, nats: float, step: int) -> bool:
        """Take one more into account; whether it is the best."""
        if nats < self.nats:
            self.nats, self.step, self.since = nats, step, 0
            return True
        self.since += 1
        return False

    def is_stale(self, patience: int) -> bool:
        """Whether so many validations in a row were not better; never for 0."""
        return 0 < patience <= self.since
