"""Rows of different length as tensors and back."""

from __future__ import annotations

import pytest
import torch

from reflux.components.sequences import batched, padded


@pytest.mark.parametrize("rows", [[[5]], [[5, 6], [7]], [[1, 2, 3], [0], [0, 0]], [[9, 0, 0], []]])
def test_rows_come_back_from_the_tensors(rows: list[list[int]]):
    input_BT, mask_BT, position_BT = padded(rows, 0)  # 0 is also a token: the mask decides, not the id
    assert input_BT.shape == mask_BT.shape == position_BT.shape == (len(rows), max(map(len, rows)))
    assert input_BT.dtype == mask_BT.dtype == position_BT.dtype == torch.int64
    for b, row in enumerate(rows):
        assert input_BT[b][mask_BT[b] == 1].tolist() == row
        assert position_BT[b][mask_BT[b] == 1].tolist() == list(range(len(row)))
        assert (mask_BT[b].diff() <= 0).all()  # padding is on the right
        assert (input_BT[b][mask_BT[b] == 0] == 0).all()


def test_the_pad_token_is_the_one_asked_for():
    assert padded([[1], [1, 2]], 9)[0].tolist() == [[1, 9], [1, 2]]


@pytest.mark.parametrize(("rows", "size"), [(0, 3), (1, 3), (3, 3), (7, 3), (7, 1)])
def test_batches_are_the_rows_in_order(rows: int, size: int):
    sequences = [[n] for n in range(rows)]
    batches = list(batched(sequences, size))
    assert [row for batch in batches for row in batch] == sequences
    assert all(len(batch) == size for batch in batches[:-1])
    assert all(1 <= len(batch) <= size for batch in batches)
