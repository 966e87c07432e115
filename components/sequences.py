"""Traces and rollouts as batches of token ids: the one place where stages turn rows of different length into tensors.

Padding is on the right and marked in the mask; position ids are explicit, since a low-bit model's scales depend on
them. Shapes: B sequences, R rows, T tokens of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch

Item = TypeVar("Item")


def padded(sequences: Sequence[Sequence[int]], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, attention mask and position ids, all [B, T] int64."""
    longest = max(len(ids) for ids in sequences)
    input_BT = torch.tensor([[*ids, *[pad_token_id] * (longest - len(ids))] for ids in sequences])
    mask_BT = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in sequences])
    position_BT = torch.arange(longest).expand(len(sequences), longest)
    return input_BT, mask_BT, position_BT


def packed(
    sequences: Sequence[Sequence[int]], pad_token_id: int
) -> tuple[torch.Tensor, torch.Tensor, list[tuple[int, int]]]:
    """Token ids and position ids, both [R, T] int64, and the row and column at which each sequence begins.

    Each goes, the longest first, into the first row that has room. Positions begin anew with each sequence, and that is
    how transformers tells them apart when it is given no mask: no token attends to another sequence.
    """
    longest = max(len(ids) for ids in sequences)
    rows: list[list[int]] = []
    positions: list[list[int]] = []
    places = [(0, 0)] * len(sequences)
    for index in sorted(range(len(sequences)), key=lambda index: -len(sequences[index])):
        ids = sequences[index]
        row = next((r for r, there in enumerate(rows) if len(there) + len(ids) <= longest), len(rows))
        if row == len(rows):
            rows.append([])
            positions.append([])
        places[index] = (row, len(rows[row]))
        rows[row] += ids
        positions[row] += range(len(ids))
    for there, at in zip(rows, positions, strict=True):
        free = longest - len(there)
        there += [pad_token_id] * free
        at += range(free)
    return torch.tensor(rows), torch.tensor(positions), places


def batched(sequences: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """Consecutive batches of at most `size`."""
    for start in range(0, len(sequences), size):
        yield sequences[start : start + size]
