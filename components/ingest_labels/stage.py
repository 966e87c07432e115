"""Expert labels: ratings of single steps joined to the traces; what cannot be joined is kept aside with the reason."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from reflux.components.artifacts import Artifact, Writer
from reflux.components.ingest_labels.agreement import krippendorff_alpha
from reflux.components.ingest_labels.config import IngestLabelsConfig
from reflux.components.ingest_labels.validation import Label, Traces, read_label, require_columns
from reflux.components.records import Record, read_records, rejected_table, shown
from reflux.components.schemas import HARD_SAMPLES, LABELS, REJECTED


def run(config: IngestLabelsConfig, *, traces: Artifact, labels: Writer) -> dict[str, float]:
    """Write the tables labels, hard_samples and rejected. ValueError for a file without a single usable row."""
    known = Traces(
        row
        for batch in traces.batches("traces", columns=["trace_id", "prompt_id", "step_starts"])
        for row in batch.to_pylist()
    )
    found: list[Label] = []
    rejected: list[dict[str, Any]] = []
    if config.labels_uri:
        path = labels.source("labels_uri")
        found, rejected = read_labels(path, known)

    samples = hard_samples(found, config.hard_rating)
    labels.write_table("labels", pa.Table.from_pylist([asdict(label) for label in found], schema=LABELS), LABELS)
    labels.write_table("hard_samples", pa.Table.from_pylist(samples, schema=HARD_SAMPLES), HARD_SAMPLES)
    labels.write_table("rejected", rejected_table(rejected), REJECTED)
    return _metrics(found, rejected, samples)


def read_labels(path: Path, traces: Traces) -> tuple[list[Label], list[dict[str, Any]]]:
    """What `join` gives for a file. ValueError if no label comes of it: its name, and why the first row is none."""
    records = list(read_records(path))
    try:
        require_columns(records)
    except ValueError as error:
        raise ValueError(f"labels {path.name}: {error}") from None
    labels, rejected = join(records, traces)
    if not labels:
        first = f"all {len(rejected)} were rejected, the first for {rejected[0]['reason']}" if rejected else ""
        raise ValueError(f"labels {path.name}: no usable row; {first or 'it is empty'}")
    return labels, rejected


def join(records: list[Record], traces: Traces) -> tuple[list[Label], list[dict[str, Any]]]:
    """Labels in file order, and rows of the table `rejected`. If an annotator rated a step twice, the first counts."""
    labels: dict[tuple[str, int, str], Label] = {}
    places: dict[tuple[str, int, str], str] = {}
    rejected = []
    for record in records:
        try:
            label = read_label(record, traces)
            identity = (label.trace_id, label.step, label.annotator)
            if identity in labels:
                raise ValueError(f"annotator {shown(label.annotator)}: rated this step before, in {places[identity]}")
        except ValueError as error:
            rejected.append(record.rejected(str(error)))
            continue
        labels[identity], places[identity] = label, record.place
    return list(labels.values()), rejected


def hard_samples(labels: list[Label], hard_rating: int) -> list[dict[str, Any]]:
    """One row per labelled trace, in the order of the first label."""
    by_trace: dict[str, list[Label]] = defaultdict(list)
    for label in labels:
        by_trace[label.trace_id].append(label)
    samples = []
    for trace_id, own in by_trace.items():
        ratings = [label.rating for label in own]
        holds = {
            "low_rating": min(ratings) <= hard_rating,
            "overload": any(label.overload for label in own),
            "guardrail": any(label.guardrail for label in own),
        }
        samples.append(
            {
                "trace_id": trace_id,
                "prompt_id": own[0].prompt_id,
                "ratings": len(ratings),
                "rating_mean": sum(ratings) / len(ratings),
                "rating_min": min(ratings),
                "hard": any(holds.values()),
                "reasons": [reason for reason, true in holds.items() if true],
            }
        )
    return samples


def _metrics(labels: list[Label], rejected: list[dict[str, Any]], samples: list[dict[str, Any]]) -> dict[str, float]:
    metrics = {
        "labels": float(len(labels)),
        "rejected": float(len(rejected)),
        "annotators": float(len({label.annotator for label in labels})),
        "labelled_traces": float(len(samples)),
    }
    if samples:
        metrics["hard_share"] = sum(sample["hard"] for sample in samples) / len(samples)
    alpha = krippendorff_alpha(labels)
    return metrics if alpha is None else metrics | {"krippendorff_alpha": alpha}
