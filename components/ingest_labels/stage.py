"""Expert labels: what people said about steps and spans of answers, joined to the traces, and how far they agree.

What cannot be joined, or was said again, is kept aside with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from reflux.components.artifacts import Artifact, Writer
from reflux.components.ingest_labels.agreement import by_dimension
from reflux.components.ingest_labels.config import IngestLabelsConfig
from reflux.components.ingest_labels.formats import plain_rows
from reflux.components.ingest_labels.known_traces import Traces
from reflux.components.ingest_labels.resolution import Ingested, join
from reflux.components.ingest_labels.samples import Facts, composition, hard_samples
from reflux.components.ingest_labels.validation import Mark, require_columns
from reflux.components.records import Record, read_text_field, rejected_table
from reflux.components.schemas import AGREEMENT, COMPOSITION, HARD_SAMPLES, KEY_TOKENS, LABELS, REJECTED

READ = [
    "trace_id", "prompt_id", "dimension", "response", "response_char_ends", "step_starts", "stop_reason",
    "ends_in_loop",
]  # fmt: skip
NOTHING = Ingested(labels=[], marks=[], rejected=[], repeated=0, replaced=0)


def run(config: IngestLabelsConfig, *, traces: Artifact, labels: Writer) -> dict[str, float]:
    """Write labels, key_tokens, hard_samples, agreement, composition and rejected. ValueError for files without a
    single usable row.
    """
    found, facts = NOTHING, list[Facts]()
    if config.labels_uri:
        path = labels.source("labels_uri")
        records = load(path)
        found = ingest(records, path.name, Traces(_rows(traces, _named(records), facts)))
    samples = hard_samples(found.labels, config.hard_rating)
    dimensions = {fact.trace_id: fact.dimension for fact in facts}
    agreement = by_dimension(found.labels, dimensions, config.seed)
    composed = composition(samples, facts) if samples else []
    for name, rows, schema in (
        ("labels", [asdict(label) for label in found.labels], LABELS),
        ("key_tokens", [row for mark in found.marks for row in _tokens(mark)], KEY_TOKENS),
        ("hard_samples", samples, HARD_SAMPLES),
        ("agreement", agreement, AGREEMENT),
        ("composition", composed, COMPOSITION),
    ):
        labels.write_table(name, pa.Table.from_pylist(rows, schema=schema), schema)
    labels.write_table("rejected", rejected_table(found.rejected), REJECTED)
    return _metrics(found, samples, agreement, composed)


def load(path: Path) -> list[Record]:
    """Every row that labels_uri leads to, in the plain form. ValueError if none can be a label."""
    records = list(plain_rows(path))
    try:
        require_columns(records)
    except ValueError as error:
        raise ValueError(f"labels {path.name}: {error}") from None
    return records


def ingest(records: list[Record], name: str, traces: Traces) -> Ingested:
    """What `join` makes of the rows of a file. ValueError if nothing comes of it, with why of the first row."""
    found = join(records, traces)
    if not found.labels and not found.marks:
        rejected = found.rejected
        first = f"all {len(rejected)} were rejected, the first for {rejected[0]['reason']}" if rejected else ""
        raise ValueError(f"labels {name}: no usable row; {first or 'it is empty'}")
    return found


def _named(records: list[Record]) -> set[str]:
    """Ids of traces and prompts that some row names; what cannot be one is refused when its row is read."""
    named = set()
    for record in records:
        for name in ("trace_id", "prompt_id"):
            with suppress(ValueError):
                named.add(read_text_field(record.values, name))
    return named


def _rows(traces: Artifact, wanted: set[str], facts: list[Facts]) -> Iterator[dict[str, Any]]:
    """What labels may refer to, with its text only where one does, since all texts together may be large."""
    for batch in traces.batches("traces", columns=[*READ, "entropy_nats"]):
        entropies = batch.column("entropy_nats")
        for index, row in enumerate(batch.select(READ).to_pylist()):
            entropy_T = entropies[index].values.to_numpy()
            facts.append(
                Facts(
                    trace_id=row["trace_id"],
                    dimension=row["dimension"],
                    tokens=len(entropy_T),
                    entropy_nats=float(entropy_T.mean(dtype="float64")) if len(entropy_T) else 0.0,
                    stop_reason=row["stop_reason"],
                    ends_in_loop=row["ends_in_loop"],
                )
            )
            if wanted.isdisjoint((row["trace_id"], row["prompt_id"])):
                row |= {"response": None, "response_char_ends": None}
            yield row


def _tokens(mark: Mark) -> Iterator[dict[str, Any]]:
    for position in mark.positions:
        yield {
            "trace_id": mark.trace_id,
            "prompt_id": mark.prompt_id,
            "annotator": mark.annotator,
            "mark": mark.mark,
            "position": position,
        }


def _metrics(
    found: Ingested, samples: list[dict[str, Any]], agreement: list[dict[str, Any]], composed: list[dict[str, Any]]
) -> dict[str, float]:
    """Only finite numbers: what is undefined is left out, since neither MLflow nor KFP has a null."""
    matched = [label.matched_by for label in found.labels]
    metrics = {
        "labels": float(len(found.labels)),
        "rejected": float(len(found.rejected)),
        "repeated": float(found.repeated),
        "replaced": float(found.replaced),
        "carried": float(sum(label.carried_from is not None for label in found.labels)),
        "matched_by_prompt_alone": float(matched.count("prompt_id")),
        "marked_tokens": float(sum(len(mark.positions) for mark in found.marks)),
        "annotators": float(
            len({label.annotator for label in found.labels} | {mark.annotator for mark in found.marks})
        ),
        "labelled_traces": float(len(samples)),
        "steps_rated_twice": float(agreement[0]["steps"]),
    }
    if samples:
        metrics["hard_share"] = sum(sample["hard"] for sample in samples) / len(samples)
    for row in composed:
        if (row["sample_set"], row["property"]) == ("hard", "hesitant"):
            metrics["hard_hesitant_share"] = row["share"]
    for name in ("alpha", "alpha_low", "alpha_high"):
        if agreement[0][name] is not None:
            metrics[f"krippendorff_{name}"] = agreement[0][name]
    return metrics
