"""How fast traces are written and read, beside plain pyarrow on the same tables.

Ours are shards through `Writer` and `Artifact`: hashed, synced to disk, pointed to, committed with a manifest, verified
when read. Plain is pyarrow.parquet to and from a local file, with its defaults and with our encodings. All take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from reflux.components import schemas, tables
from reflux.components.artifacts import Artifact, Writer
from reflux.components.storage import Store

from .arrow_numbers import flat

COLUMNS = ["topk_token_ids", "topk_logprobs", "tail_logmass"]
ROWS, TOKENS = 32, 256
"""As many traces in a shard and tokens in a trace as a run has by default."""


def ratios(folder: Path, table: pa.Table, vocab_size: int, *, shards: int, rounds: int) -> dict[str, float]:
    """Prints all speeds; ratio_write and ratio_read are ours over that of the faster plain way."""
    full = schemas.traces_topk(_width(table), vocab_size)
    schema = pa.schema([full.field(name) for name in ["trace_id", *COLUMNS]])
    made = list(many_tables(table, schema, vocab_size, shards))
    megabytes = sum(one.nbytes for one in made) / 1e6
    ours: dict[str, Any] = {}

    def write_ours(place: Path) -> None:
        writer = Writer(
            Store.open(str(place)), stage="bench", version="1", key_fields={}, other_fields={}, parents={}, sources={}
        )
        for number, one in enumerate(made):
            writer.write_table(f"traces/{number:05d}", one, schema)
        ours["artifact"] = writer.commit({})

    def read_ours(_place: Path) -> pa.Table:
        artifact = ours["artifact"]
        return Artifact.open(artifact.store, artifact.stage, artifact.key).table("traces")

    def write_plain(place: Path) -> None:
        place.mkdir()
        for number, one in enumerate(made):
            pq.write_table(one, place / f"{number:05d}.parquet")

    def write_encoded(place: Path) -> None:
        place.mkdir()
        for number, one in enumerate(made):
            pq.write_table(one, place / f"{number:05d}.parquet", **tables.parquet_options(schema))

    def read_plain(place: Path) -> pa.Table:
        return pa.concat_tables(pq.read_table(file) for file in sorted(place.glob("*.parquet")))

    ways = {
        "reflux": (write_ours, read_ours),
        "pyarrow, its defaults": (write_plain, read_plain),
        "pyarrow, our encodings": (write_encoded, read_plain),
    }
    seconds: dict[tuple[str, str], list[float]] = {(way, what): [] for way in ways for what in ("write", "read")}
    for number in range(rounds + 1):  # the first round warms up
        for way, (write, read) in ways.items():
            place = folder / f"{number}-{way}"
            times = {"write": timed(write, place), "read": timed(read, place)}
            if number:
                for what, spent in times.items():
                    seconds[way, what].append(spent)
    print(f"\n{megabytes:.0f} MB of top-k columns in {shards} shards, medians of {rounds} rounds in turn, MB/s (range)")
    print("\n| | write | read |\n|---|---|---|")
    speed = {key: megabytes / statistics.median(spent) for key, spent in seconds.items()}
    for way in ways:
        cells = [
            f"{speed[way, what]:.0f} ({megabytes / max(spent):.0f} to {megabytes / min(spent):.0f})"
            for what in ("write", "read")
            for spent in [seconds[way, what]]
        ]
        print(f"| {way} | {cells[0]} | {cells[1]} |")
    print()
    others = [way for way in ways if way != "reflux"]
    return {
        f"ratio_{what}": min(speed["reflux", what] / speed[way, what] for way in others) for what in ("write", "read")
    }


def many_tables(table: pa.Table, schema: pa.Schema, vocab_size: int, shards: int) -> Iterator[pa.Table]:
    """Traces like the collected ones, none twice: their tokens in another order, ids moved, log-probabilities bent."""
    rng = np.random.default_rng(0)
    ids_NK, logprobs_NK = (flat(table[name]).reshape(-1, _width(table)) for name in ("topk_token_ids", "topk_logprobs"))
    tail_N = flat(table["tail_logmass"])
    for shard in range(shards):
        chosen = rng.integers(0, len(tail_N), ROWS * TOKENS)
        moved = (ids_NK[chosen].astype(np.int64) + rng.integers(0, vocab_size, (len(chosen), 1))) % vocab_size
        bent = (logprobs_NK[chosen] * rng.uniform(0.9, 1.1, (len(chosen), 1))).astype(np.float16)
        columns = [pa.array([f"{shard * ROWS + number:064x}" for number in range(ROWS)])]
        offsets = pa.array(np.arange(ROWS + 1) * TOKENS, pa.int32())
        for name, values in zip(COLUMNS, (moved, bent, tail_N[chosen]), strict=True):
            dtype = schema.field(name).type
            item = dtype.value_type
            fixed = pa.types.is_fixed_size_list(item)
            numbers = pa.array(values.reshape(-1)).cast(item.value_type if fixed else item)
            rows = pa.FixedSizeListArray.from_arrays(numbers, type=item) if fixed else numbers
            columns.append(pa.ListArray.from_arrays(offsets, rows, type=dtype))
        yield pa.table(columns, schema=schema)


def _width(table: pa.Table) -> int:
    return table.schema.field("topk_token_ids").type.value_type.list_size


def timed(action: Callable[[Path], Any], place: Path) -> float:
    begin = time.perf_counter()
    action(place)
    return time.perf_counter() - begin
