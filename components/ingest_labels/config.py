"""Parameters of ingest_labels."""

from __future__ import annotations

from dataclasses import dataclass

from reflux.components.declare import source

STAGE_VERSION = "2"


@dataclass(frozen=True, kw_only=True)
class IngestLabelsConfig:
    """Join expert ratings to the steps of the traces and mark the samples that experts found hard."""

    labels_uri: str = source()
    """File, zip archive or folder of ratings per step: an export of Label Studio, Argilla or MLflow, or plain JSONL,
    CSV or Parquet; empty where there are no labels."""
    hard_rating: int = 2
    """A step rated this or lower, from 1 to 5, makes its trace a hard sample."""
    seed: int = 0
    """Of the resampling behind the interval of the annotators' agreement."""

    def __post_init__(self) -> None:
        if not 1 <= self.hard_rating <= 5:
            raise ValueError(f"ingest_labels.hard_rating {self.hard_rating}: must be from 1 to 5")
