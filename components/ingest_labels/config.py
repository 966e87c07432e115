"""Parameters of ingest_labels."""

from __future__ import annotations

from dataclasses import dataclass

from reflux.components.declare import source

STAGE_VERSION = "1"


@dataclass(frozen=True, kw_only=True)
class IngestLabelsConfig:
    """Join expert ratings to the steps of the traces and mark the samples that experts found hard."""

    labels_uri: str = source()
    """JSONL, CSV or Parquet file (or a folder of them) of ratings per step; empty where there are no labels."""
    hard_rating: int = 2
    """A step rated this or lower, from 1 to 5, makes its trace a hard sample."""

    def __post_init__(self) -> None:
        if not 1 <= self.hard_rating <= 5:
            raise ValueError(f"ingest_labels.hard_rating {self.hard_rating}: must be from 1 to 5")
