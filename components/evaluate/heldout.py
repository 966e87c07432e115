"""Held-out traces as batches: the teacher's answers to prompts that no training step has seen.

Every response token is a decision. It is predicted from the hidden state one place before it, so only those states are
kept. Rows are padded on the right, with explicit positions and mask: what a token scores does not depend on its
neighbours. Shapes: B traces, T tokens, N response tokens of the batch in order, trace after trace.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reflux.components.artifacts import Artifact
from reflux.components.sequences import padded

COLUMNS = ["trace_id", "prompt_id", "split", "prompt", "prompt_token_ids", "response_token_ids"]


@dataclass(frozen=True, kw_only=True)
class Trace:
    trace_id: str
    prompt_id: str
    prompt: str
    prompt_token_ids: list[int]
    response_token_ids: list[int]

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.response_token_ids)


@dataclass(frozen=True, kw_only=True)
class Batch:
    traces: list[Trace]
    input_BT: Tensor
    mask_BT: Tensor
    position_BT: Tensor
    decision_BT: Tensor
    """True where the hidden state predicts a response token."""
    target_N: Tensor

    def split(self, values_N: Tensor) -> list[Tensor]:
        """The values of each trace."""
        return list(values_N.split([len(trace.response_token_ids) for trace in self.traces]))


def heldout_traces(traces: Artifact, limit: int, context: int) -> list[Trace]:
    """The first `limit` held-out traces by trace_id (0: all). ValueError if there is none, or one is longer than the
    student's context.
    """
    rows = [
        Trace(**{name: value for name, value in row.items() if name != "split"})
        for batch in traces.batches("traces", columns=COLUMNS)
        for row in batch.to_pylist()
        if row["split"] == "heldout"
    ]
    if not rows:
        raise ValueError("the traces hold no held-out answer: give more prompts or raise the held-out share")
    rows = sorted(rows, key=lambda trace: trace.trace_id)[: limit or None]
    longest = max(rows, key=len)
    if len(longest) > context:
        raise ValueError(f"trace {longest.trace_id}: {len(longest)} tokens, the student's context is {context}")
    return rows


def batches(traces: list[Trace], size: int, pad_token_id: int) -> list[Batch]:
    """Traces of similar length together, so that little is padded."""
    ordered = sorted(traces, key=lambda trace: (len(trace), trace.trace_id))
    return [_batch(ordered[start : start + size], pad_token_id) for start in range(0, len(ordered), size)]


def _batch(traces: list[Trace], pad_token_id: int) -> Batch:
    input_BT, mask_BT, position_BT = padded([t.prompt_token_ids + t.response_token_ids for t in traces], pad_token_id)
    decision_BT = torch.zeros_like(mask_BT, dtype=torch.bool)
    for row, trace in enumerate(traces):
        decision_BT[row, len(trace.prompt_token_ids) - 1 : len(trace) - 1] = True
    return Batch(
        traces=traces,
        input_BT=input_BT,
        mask_BT=mask_BT,
        position_BT=position_BT,
        decision_BT=decision_BT,
        target_N=torch.tensor([token for trace in traces for token in trace.response_token_ids]),
    )
