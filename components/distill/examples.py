"""Sequences to train on: the teacher's traces joined with what was stored of its distributions, and the student's own
rollouts.

A trace without its distributions is an error with a count, never trained on as hard targets (objectives.md, rule 7);
so is a store that was made with another tokenizer, template, temperature or k, or that cannot serve the objective
(rules 6 and 8).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc

from reflux.components import models
from reflux.components.artifacts import Artifact

from .config import DistillConfig
from .stored import READERS, Stored
from .terms import OBJECTIVES

COLUMNS = ["trace_id", "split", "prompt_token_ids", "response_token_ids"]


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """Token ids of which those from `first_scored` on are compared with the teacher."""

    token_ids: list[int]
    first_scored: int
    teacher: Stored | None = None
    """Stored distributions of a trace; None for a rollout, which the teacher scores when it is trained on."""
    drawn_nats: list[float] | None = None
    """Of a rollout, log-probability that each scored token was drawn with; where an objective needs it."""
    weight: float = 1.0
    """Importance weight of a rollout among those to its prompt, 1 on average."""
    advantage: float = 0.0
    """Of a rollout among those to its prompt, as a verifier judged them."""
    cut_tokens: int = 0
    """Tokens left off at the end to fit the longest sequence allowed."""

    @property
    def scored(self) -> int:
        """Tokens compared; 0 where the prompt alone is too long."""
        return max(0, len(self.token_ids) - self.first_scored)


def require_contract(metadata: dict[str, str], tokenizer: Any, teacher_digest: str) -> None:
    """ValueError if the traces' distributions are not those of this teacher for this tokenizer and template, at
    temperature 1, in a store that can be read here.
    """
    expected = {
        "teacher_digest": teacher_digest,
        "scored_temperature": "1.0",
        "tokenizer": models.tokenizer_fingerprint(tokenizer),
        "chat_template": models.template_fingerprint(tokenizer),
    }
    for field, value in expected.items():
        if metadata.get(field) != value:
            raise ValueError(f"traces: {field} is {metadata.get(field)!r}, distill needs {value!r}; collect them again")
    if metadata.get("trace_store") not in READERS:
        raise ValueError(
            f"traces: trace_store is {metadata.get('trace_store')!r}, distill needs {' or '.join(READERS)}; collect "
            "them again"
        )


def require_usable(config: DistillConfig, store: str, kept: int) -> None:
    """ValueError if a store of this kind, with this many tokens kept (topk) or drawn (sampled) for each, does not give
    what the configuration asks for.

    Draws say nothing about the tokens that were not drawn: a loss that weighs by the student's probabilities (the
    reverse KL and every mixture) would reward moving mass there.
    """
    for term in config.trace_terms if store == "sampled" else ():
        traits = OBJECTIVES[term.name]
        if not traits.draws or config.parameter(term):
            at = f" with {traits.parameter} {config.parameter(term)}" if traits.parameter else ""
            served = [
                name + (f" with {t.parameter} 0" if t.parameter else "") for name, t in OBJECTIVES.items() if t.draws
            ]
            field = "trace_objective" if config.trace_objective else "objective"
            raise ValueError(
                f"distill.{field} {term.name!r}{at}: needs the teacher's support, and the traces hold a sampled "
                f"store, which serves {', '.join(served)}; collect them with trace_store topk"
            )
    if config.trace_k and config.trace_k != kept:
        raise ValueError(
            f"distill.trace_k {config.trace_k}: the traces were collected with {kept}; 0 takes what is there"
        )


def training_examples(traces: Artifact, max_tokens: int) -> dict[str, Sequence]:
    """Trace id -> sequence, for the training split in order of trace id; answers beyond `max_tokens` are cut."""
    reader = READERS[traces.schema_metadata("traces")["trace_store"]]
    columns = [*COLUMNS, *reader.columns]
    table = traces.table("traces", columns)
    table = table.filter(pc.equal(table["split"], "train")).sort_by("trace_id").combine_chunks()
    sequences: dict[str, Sequence] = {}
    uncovered = []
    for index in range(table.num_rows):
        row = {name: table[name][index] for name in columns}
        trace_id, prompt, response = (
            row[name].as_py() for name in ("trace_id", "prompt_token_ids", "response_token_ids")
        )
        if not reader.covers(row, len(response)):
            uncovered.append(trace_id)
            continue
        kept = max(0, min(len(response), max_tokens - len(prompt)))
        if kept:
            sequences[trace_id] = Sequence(
                token_ids=prompt + response[:kept],
                first_scored=len(prompt),
                teacher=reader.decode(row).first(kept),
                cut_tokens=len(response) - kept,
            )
    if uncovered:
        raise ValueError(
            f"traces: {len(uncovered)} lack distributions for some of their tokens, the first is {uncovered[0]}"
        )
    if not sequences:
        raise ValueError(f"traces: none of the training split has an answer within {max_tokens} tokens")
    return sequences
