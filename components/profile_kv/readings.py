"""The forwards in which a model reads the traces, a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from reflux.components import progress
from reflux.components.algorithms.not_finite import require_finite
from reflux.components.sequences import batched, padded

Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A forward to be made."""

    model: Any
    names: list[str]
    mask_BT: torch.Tensor
    forward: Callable[[], Any]

    def output(self) -> Any:
        """The decoder's. ValueError that names the place where numbers stop being finite."""
        output = self.forward()
        hidden_ND = output.last_hidden_state[self.mask_BT.bool()]
        require_finite(hidden_ND, "profile_kv", self.names, self.model, self.forward, self.mask_BT)
        return output


def readings(model: Any, tokenizer: Any, rows: Rows, batch_traces: int, what: str) -> Iterator[Reading]:
    """Of all traces, in their order; `what` is said in the progress that is reported once a reading is done with."""
    sequences = [token_ids(row) for row in rows]
    names = [f"trace {row['trace_id']}" for row in rows]
    done = 0
    for batch in batched(sequences, batch_traces):
        input_BT, mask_BT, position_BT = padded(batch, tokenizer.pad_token_id or 0)
        forward = partial(model.model, input_BT, attention_mask=mask_BT, position_ids=position_BT, use_cache=True)
        yield Reading(model=model, names=names[done : done + len(batch)], mask_BT=mask_BT, forward=forward)
        done += len(batch)
        progress.report(done, len(sequences), what)


def token_ids(row: dict[str, Any]) -> list[int]:
    """Prompt and answer."""
    return row["prompt_token_ids"] + row["response_token_ids"]
