"""`reflux store du` and `reflux store gc`: what a store holds, what for, what goes, and its removal on request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from reflux.components.storage import Store
from reflux.pipelines.review import registered_models
from reflux.pipelines.review.lineage import megabytes
from reflux.pipelines.store import garbage, inventory, removal, stores
from reflux.pipelines.store.garbage import Fate, Plan

GRACE_HOURS = 24.0


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a person wants kept. All runs of the project unless `last` is given."""

    data_dir: Path
    last: int | None = None
    names: tuple[str, ...] = ()
    """Digests, folders of bundles, runs."""
    grace_hours: float = GRACE_HOURS

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 1:
            raise ValueError(f"--keep-last {self.last}: at least 1")
        if self.grace_hours < 0:
            raise ValueError(f"--grace-hours {self.grace_hours}: at least 0")


def examine(store: str, endpoint: str, kept: Kept) -> Plan:
    """What gc would do. Nothing is changed."""
    with stores.opened(stores.choose(store, endpoint, kept.data_dir)[0]) as (opened, _):
        return _plan(opened, kept)[0]


def collect(store: str, endpoint: str, kept: Kept) -> tuple[Plan, removal.Removed]:
    """Remove what goes. ValueError if nothing at all is known to be wanted, which looks like a mistake."""
    with stores.opened(stores.choose(store, endpoint, kept.data_dir)[0]) as (opened, _):
        plan, wanted = _plan(opened, kept)
        if not wanted and any(fate.goes for fate in plan.fates):
            raise ValueError(
                f"store {opened.where}: neither a run in {kept.data_dir / 'runs'} nor --keep names an artifact of it, "
                "so all of it would go; name the right --data-dir, or what to keep"
            )
        return plan, removal.carry_out(opened, plan)


def _plan(store: Store, kept: Kept) -> tuple[Plan, bool]:
    """The plan, and whether any root of it is in the store."""
    held = inventory.take(store)
    roots, unfinished = inventory.roots_of_runs(kept.data_dir, kept.last)
    roots |= inventory.roots_of_names(held, store, kept.names, kept.data_dir)
    roots |= registered_models.kept(store, kept.data_dir)
    wanted = any(place in held.items for places in roots.values() for place in places)
    return garbage.plan(held, roots, unfinished, kept.grace_hours * 3600), wanted


def to_json(plan: Plan) -> list[dict[str, Any]]:
    return [
        {
            "stage": fate.item.place[0],
            "key": fate.item.place[1],
            "digest": fate.item.digest,
            "bytes": fate.bytes,
            "objects": len(fate.item.entries),
            "committed": fate.item.committed,
            "runs": [reason.removeprefix("run ") for reason in fate.kept_for if reason.startswith("run ")],
            "kept_for": list(fate.kept_for),
            "goes_bytes": fate.goes_bytes,
            "goes": list(fate.goes),
        }
        for fate in sorted(plan.fates, key=lambda fate: -fate.bytes)
    ]


def show(plan: Plan) -> None:
    """Every artifact, the largest first, and a line per stage."""
    table = _table()
    for fate in sorted(plan.fates, key=lambda fate: -fate.bytes):
        _row(table, fate, fate.bytes, len(fate.item.entries))
    console = _console()
    console.print(table)
    stages: dict[str, int] = {}
    for fate in plan.fates:
        stages[fate.item.place[0]] = stages.get(fate.item.place[0], 0) + fate.bytes
    for stage, size in sorted(stages.items(), key=lambda pair: -pair[1]):
        console.print(f"{megabytes(size)} of {stage}")
    _show_remarks(console, plan.remarks)
    console.print(f"{megabytes(sum(fate.bytes for fate in plan.fates))} in {len(plan.fates)} artifacts")
    if going := sum(fate.goes_bytes for fate in plan.fates):
        console.print(f"{megabytes(going)} of it would go with `reflux store gc`")


def show_going(plan: Plan, removed: removal.Removed | None) -> None:
    """What goes; `removed` is None if nothing was touched."""
    table = _table()
    for fate in plan.fates:
        if fate.goes:
            _row(table, fate, fate.goes_bytes, len(fate.goes))
    console = _console()
    if table.row_count:
        console.print(table)
    _show_remarks(console, plan.remarks)
    leftovers = len(plan.discarded) + len(plan.removed)
    if leftovers:
        console.print(f"{leftovers} leftovers of writes that were cut off")
    if removed is None:
        console.print(f"{megabytes(sum(fate.goes_bytes for fate in plan.fates))} would go; --delete removes it")
        return
    for folder in removed.spared:
        console.print(f"spared, in use again: {folder}")
    console.print(f"removed: {megabytes(removed.bytes)} in {removed.objects} objects")


def _table() -> Table:
    table = Table(box=None, pad_edge=False)
    for title, side in (
        ("stage", "left"),
        ("key", "left"),
        ("size", "right"),
        ("objects", "right"),
        ("kept for", "left"),
    ):
        table.add_column(title, justify=side)  # type: ignore[arg-type]
    return table


def _row(table: Table, fate: Fate, size: int, objects: int) -> None:
    stage, key = fate.item.place
    why = ", ".join(fate.kept_for) or ("nothing" if fate.item.committed else "nothing, and unfinished")
    table.add_row(stage, f"{key[:12]}…", megabytes(size), str(objects), why)


def _show_remarks(console: Console, remarks: Sequence[str]) -> None:
    for remark in remarks:
        console.print(f"missing: {remark}")


def _console() -> Console:
    return Console(soft_wrap=True, highlight=False)
