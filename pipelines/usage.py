"""`reflux store du`: what a store keeps, artifact by artifact, and which runs it is kept for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from reflux.pipelines import runs, stores
from reflux.pipelines.lineage import megabytes


@dataclass(frozen=True, kw_only=True)
class Usage:
    stage: str
    key: str
    bytes: int
    objects: int
    committed: bool
    """False: shards and checkpoints of an attempt that is still running or was killed."""
    runs: list[str]
    """Of this --data-dir. An artifact that none refers to may still be a parent, or belong to somebody else's run."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(store: str, endpoint: str, data_dir: Path) -> list[Usage]:
    """Every artifact, largest first."""
    ref, _ = stores.choose(store, endpoint, data_dir)
    referring = _referring(data_dir)
    found: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    with stores.opened(ref) as (opened, _):
        for name, size in opened.sizes("objects").items():
            _, stage, key, rest = name.split("/", 3)
            found[stage, key][rest] = size
    rows = [
        Usage(
            stage=stage, key=key, bytes=sum(objects.values()), objects=len(objects),
            committed="manifest.json" in objects, runs=sorted(referring[stage, key]),
        )
        for (stage, key), objects in found.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -row.bytes)


def show(rows: list[Usage]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    table = Table(box=None, pad_edge=False)
    for title, side in (("stage", "left"), ("key", "left"), ("size", "right"), ("objects", "right"), ("runs", "left")):
        table.add_column(title, justify=side)  # type: ignore[arg-type]
    for row in rows:
        names = ", ".join(row.runs) or ("no run here" if row.committed else "unfinished")
        table.add_row(row.stage, f"{row.key[:12]}…", megabytes(row.bytes), str(row.objects), names)
    console.print(table)
    console.print(f"{megabytes(sum(row.bytes for row in rows))} in {len(rows)} artifacts")


def _referring(data_dir: Path) -> dict[tuple[str, str], set[str]]:
    """(stage, key) -> names of the runs whose artifact it is."""
    referring: dict[tuple[str, str], set[str]] = defaultdict(set)
    for record in runs.all_records(data_dir):
        for stage, artifact in record.artifacts.items():
            referring[stage, artifact["key"]].add(record.run)
    return referring
