"""Errors along an answer, against a loop over its tokens."""

from __future__ import annotations

import math

import pytest
import torch

from reflux.components.evaluate.heldout import Trace, batches
from reflux.components.evaluate.measure import Decisions
from reflux.components.evaluate.position_errors import position_errors

LENGTHS = (9, 1, 4, 3)


def decisions(hidden: list[torch.Tensor]) -> Decisions:
    return Decisions(head=lambda h: h, hidden=hidden, layer_outputs=[], outlier_capture=None)


def test_positions_are_filed_by_powers_of_two_over_all_batches() -> None:
    traces = [
        Trace(trace_id=f"t{n}", prompt_id=f"p{n}", prompt="", prompt_token_ids=[1], response_token_ids=[2] * length)
        for n, length in enumerate(LENGTHS)
    ]
    held = batches(traces, 3, pad_token_id=0)
    generator = torch.Generator().manual_seed(0)
    sizes = [sum(len(trace.response_token_ids) for trace in batch.traces) for batch in held]
    own, reference = ([torch.randn(size, 5, generator=generator) for size in sizes] for _ in range(2))
    expected: dict[int, list[float]] = {}
    for batch, own_ND, reference_ND in zip(held, own, reference, strict=True):
        rows = iter(zip(own_ND.double(), reference_ND.double(), strict=True))
        for trace in batch.traces:
            for position in range(len(trace.response_token_ids)):
                h, ref = next(rows)
                first = 0 if position == 0 else 2 ** int(math.log2(position))
                expected.setdefault(first, []).append(float((h - ref).norm() / ref.norm()))
    found = position_errors(decisions(own), decisions(reference), held)
    assert [each.first_position for each in found] == [0, 1, 2, 4, 8]
    assert [each.tokens for each in found] == [4, 3, 5, 4, 1]
    for each in found:
        of_bucket = expected[each.first_position]
        assert each.relative_error == pytest.approx(sum(of_bucket) / len(of_bucket), rel=1e-5)
    assert {each.relative_error for each in position_errors(decisions(own), decisions(own), held)} == {0.0}
    assert position_errors(decisions(own), decisions([torch.ones(size, 4) for size in sizes]), held) == []
