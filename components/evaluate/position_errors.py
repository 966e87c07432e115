"""How errors grow along an answer: a student writes each token after its own earlier ones, and reads them rounded.

Shapes: N decisions of a batch, trace after trace, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .heldout import Batch
from .measure import Decisions


@dataclass(frozen=True, kw_only=True)
class PositionError:
    """Of the response tokens from `first_position` on, up to the next power of two."""

    first_position: int
    tokens: int
    relative_error: float
    """Mean of |h - h_ref| / |h_ref|, h what the output head reads."""


def position_errors(own: Decisions, reference: Decisions, batches: list[Batch]) -> list[PositionError]:
    """By position in the response, over all held-out decisions; none if the two differ in width."""
    if own.hidden[0].shape[-1] != reference.hidden[0].shape[-1]:
        return []
    errors, positions = [], []
    for batch, own_ND, reference_ND in zip(batches, own.hidden, reference.hidden, strict=True):
        errors.append((own_ND - reference_ND).float().norm(dim=-1) / reference_ND.float().norm(dim=-1))
        positions += [t for trace in batch.traces for t in range(len(trace.response_token_ids))]
    error_N = torch.cat(errors)
    first_N = torch.tensor([1 << position.bit_length() >> 1 for position in positions])
    return [
        PositionError(
            first_position=int(first), tokens=int((first_N == first).sum()),
            relative_error=float(error_N[first_N == first].double().mean()),
        )
        for first in first_N.unique()
    ]  # fmt: skip
