"""Traces and rollouts as batches of token ids: the one place where stages turn rows of different length into tensors.

Padding is on the right and marked in the mask; position ids are explicit, since a low-bit model's scales depend on
them. Shapes: B sequences, T tokens of the longest.
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


def batched(sequences: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """Consecutive batches of at most `size`."""
    for start in range(0, len(sequences), size):
        yield sequences[start : start + size]
