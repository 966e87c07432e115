"""Sequences to train on: the teacher's traces joined with what was stored of its distributions, and the student's own
rollouts.

A trace without its distributions is an error with a count, never trained on as hard targets (objectives.md, rule 7);
so is a store that was made with another tokenizer, template or temperature (rule 8). Shapes: T response tokens, K
kept tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch

from reflux.components import models
from reflux.components.artifacts import Artifact

STORED = ["topk_token_ids", "topk_logprobs", "tail_logmass"]
"""What the store must hold for every response token."""
COLUMNS = ["trace_id", "split", "prompt_token_ids", "response_token_ids", *STORED]


@dataclass(frozen=True, kw_only=True)
class SparseTeacher:
    """What the store kept of the teacher's distribution at each response token."""

    token_ids_TK: torch.Tensor
    logprobs_TB: torch.Tensor
    """[T, K + 1] nats: the kept tokens, and last everything else together."""


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """Token ids of which those from `first_scored` on are compared with the teacher."""

    token_ids: list[int]
    first_scored: int
    teacher: SparseTeacher | None = None
    """Stored distributions of a trace; None for a rollout, which the teacher scores when it is trained on."""

    @property
    def scored(self) -> int:
        return len(self.token_ids) - self.first_scored


def require_contract(metadata: dict[str, str], tokenizer: Any, teacher_digest: str) -> None:
    """ValueError if the traces' distributions are not those of this teacher for this tokenizer and template, at
    temperature 1, over top-k.
    """
    expected = {
        "teacher_digest": teacher_digest,
        "trace_store": "topk",
        "scored_temperature": "1.0",
        "tokenizer": models.tokenizer_fingerprint(tokenizer),
        "chat_template": models.template_fingerprint(tokenizer),
    }
    for field, value in expected.items():
        if metadata.get(field) != value:
            raise ValueError(f"traces: {field} is {metadata.get(field)!r}, distill needs {value!r}; collect them again")


def training_examples(traces: Artifact, max_tokens: int) -> dict[str, Sequence]:
    """Trace id -> sequence, for the training split in order of trace id; answers beyond `max_tokens` are cut."""
    table = traces.table("traces", COLUMNS)
    table = table.filter(pc.equal(table["split"], "train")).sort_by("trace_id").combine_chunks()
    sequences: dict[str, Sequence] = {}
    uncovered = []
    for row in range(table.num_rows):
        values = {name: table[name][row] for name in COLUMNS}
        prompt, response = values["prompt_token_ids"].as_py(), values["response_token_ids"].as_py()
        if any(len(values[name].values) != len(response) for name in STORED):
            uncovered.append(values["trace_id"].as_py())
            continue
        sparse = _sparse(values)
        kept = max(0, min(len(response), max_tokens - len(prompt)))
        if kept:
            teacher = SparseTeacher(token_ids_TK=sparse.token_ids_TK[:kept], logprobs_TB=sparse.logprobs_TB[:kept])
            sequences[values["trace_id"].as_py()] = Sequence(
                token_ids=prompt + response[:kept], first_scored=len(prompt), teacher=teacher
            )
    if uncovered:
        raise ValueError(
            f"traces: {len(uncovered)} lack distributions for some of their tokens, the first is {uncovered[0]}"
        )
    if not sequences:
        raise ValueError(f"traces: none of the training split has an answer within {max_tokens} tokens")
    return sequences


def _sparse(values: dict[str, pa.Scalar]) -> SparseTeacher:
    ids, logprobs = (_matrix(values[name]) for name in ("topk_token_ids", "topk_logprobs"))
    tail_T1 = torch.tensor(values["tail_logmass"].as_py())[:, None]
    return SparseTeacher(token_ids_TK=ids.long(), logprobs_TB=torch.cat([logprobs.float(), tail_T1], dim=1))


def _matrix(rows: pa.ListScalar) -> torch.Tensor:
    flat = rows.values.flatten().to_numpy(zero_copy_only=False)
    return torch.from_numpy(flat.copy()).reshape(len(rows.values), -1)
