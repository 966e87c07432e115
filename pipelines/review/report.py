"""`reflux report`: the table of a run, read and verified from evaluate's artifact, for people or for scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from reflux.components.artifacts import Artifact
from reflux.components.storage import Store
from reflux.pipelines import runs
from reflux.pipelines.store import stores

COLUMNS = (
    "scheme", "perplexity", "nll_heldout", "pmr", "latency_p50_ms", "latency_p95_ms", "memory_bytes", "latency_of",
    "effective_bits",
)  # fmt: skip


def read(folder: Path, ref: stores.StoreRef | None = None) -> dict[str, Any]:
    """{"run", "verdict", "table": [{scheme, …}], "gates"} of a finished run. ValueError if it is not finished.

    `ref` replaces the store that the run records.
    """
    record = runs.read_finished(folder, "table")
    with stores.opened(ref or record.store) as (store, _):
        return from_artifact(store, record.run, record.artifacts["evaluate"]["key"])


def from_artifact(store: Store, run: str, key: str) -> dict[str, Any]:
    """The same from the artifact itself."""
    scores = Artifact.open(store, "evaluate", key)
    metrics = json.loads(scores.file("metrics.json"))
    times = {row["scheme"]: row for row in scores.table("latencies").to_pylist()}
    return {
        "run": run,
        "verdict": metrics["verdict"],
        "table": [_ordered({**row, **times[row["scheme"]]}) for row in metrics["table"]],
        "gates": metrics["gates"],
    }


def _ordered(row: dict[str, Any]) -> dict[str, Any]:
    return {column: row[column] for column in COLUMNS}


def machine_readable(result: dict[str, Any]) -> str:
    """What `--json` prints."""
    return json.dumps({name: result[name] for name in ("run", "verdict", "table")}, indent=2)


def show(result: dict[str, Any]) -> None:
    """The table, the gates and the verdict, in the terminal."""
    console = show_table(result["table"])
    for gate in result["gates"]:
        if gate["result"] != "off":
            value = "not measurable" if gate["value"] is None else f"{gate['value']:.3f}"
            threshold = f"{gate['comparison']} {gate['threshold']:g}"
            console.print(f"{gate['result']:4}  {gate['meaning']}: {value} ({threshold})", style=_style(gate["result"]))
    console.print(f"verdict: {result['verdict']}", style=_style(result["verdict"]))


def show_table(rows: list[dict[str, Any]]) -> Console:
    """A line per scheme; the terminal that it went to."""
    console = Console(soft_wrap=True, highlight=False)
    table = Table(box=None, pad_edge=False, collapse_padding=True)  # fits into 80 columns
    table.add_column("scheme", style="bold", no_wrap=True)
    for title in ("perplexity", "NLL", "PMR", "bits", "MB", "P50 ms", "P95 ms", "latency"):
        table.add_column(title, justify="left" if title == "latency" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["scheme"], f"{row['perplexity']:.2f}", f"{row['nll_heldout']:.3f}", f"{row['pmr']:.3f}",
            f"{row['effective_bits']:.2f}", f"{row['memory_bytes'] / 1e6:.1f}", f"{row['latency_p50_ms']:.1f}",
            f"{row['latency_p95_ms']:.1f}", row["latency_of"],
        )  # fmt: skip
    console.print(table)
    return console


def _style(result: str) -> str:
    return "green" if result == "pass" else "red"
