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
    sequences: Sequence[Sequence[int]], pad_token_id: int, row_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, list[tuple[int, int]]]:
    """Token ids and position ids, both [R, T] int64, and the row and column at which each sequence begins.

    Rows of at most `row_tokens`, or of the longest sequence if that is longer, and as few places as first fit by
    falling length finds. Positions begin anew with each sequence, and that is how transformers tells them apart when it
    is given no mask: no token attends to another sequence.
    """
    lengths = [len(ids) for ids in sequences]
    widths = range(max(lengths), max(row_tokens, max(lengths)) + 1)
    places, rows, width = min((_first_fit(lengths, width) for width in widths), key=lambda found: found[1] * found[2])
    input_RT = torch.full((rows, width), pad_token_id)
    position_RT = torch.arange(width).repeat(rows, 1)
    filled = [0] * rows
    for ids, (row, begin) in zip(sequences, places, strict=True):
        input_RT[row, begin : begin + len(ids)] = torch.tensor(ids)
        position_RT[row, begin : begin + len(ids)] = torch.arange(len(ids))
        filled[row] = max(filled[row], begin + len(ids))
    for row, end in enumerate(filled):
        position_RT[row, end:] = torch.arange(width - end)  # padding is a sequence of its own
    return input_RT, position_RT, places


def _first_fit(lengths: Sequence[int], width: int) -> tuple[list[tuple[int, int]], int, int]:
    """The place of each sequence in rows of `width`, the number of rows, and how wide they are filled."""
    filled: list[int] = []
    places = [(0, 0)] * len(lengths)
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        row = next((r for r, end in enumerate(filled) if end + lengths[index] <= width), len(filled))
        if row == len(filled):
            filled.append(0)
        places[index] = (row, filled[row])
        filled[row] += lengths[index]
    return places, len(filled), max(filled)


def batched(sequences: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """Consecutive batches of at most `size`."""
    for start in range(0, len(sequences), size):
        yield sequences[start : start + size]
