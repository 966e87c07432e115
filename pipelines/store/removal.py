"""Carries out a plan of garbage.py beside stages that are at work.

A stage that begins writes attempt.json into its artifact's folder and then looks for removing.json there; here
removing.json is written first, and then the folder is looked at again. So of two that meet, at least one sees the
other: the stage stops with a message, or the folder is left alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from reflux.components.artifact_writer import REMOVING
from reflux.components.storage import Entry, Store
from reflux.pipelines.store.garbage import Fate, Plan

LONGEST_S = 900.0
"""Of the removal of one folder. It is given up then, long before a stage takes its removing.json for a dead one's."""


@dataclass(frozen=True, kw_only=True)
class Removed:
    objects: int
    bytes: int
    spared: tuple[str, ...]
    """Folders that changed since the plan was made."""


def carry_out(store: Store, plan: Plan) -> Removed:
    """Remove what goes. Interrupted, it leaves nothing that another removal does not find again."""
    objects = size_bytes = 0
    spared = []
    for fate in plan.fates:
        if fate.goes and _remove(store, fate):
            objects += len(fate.goes)
            size_bytes += fate.goes_bytes
        elif fate.goes:
            spared.append("/".join(fate.item.place))
    for name in plan.discarded:
        store.discard(name)
    for key in plan.removed:
        store.delete(key)
    return Removed(objects=objects + len(plan.discarded) + len(plan.removed), bytes=size_bytes, spared=tuple(spared))


def _remove(store: Store, fate: Fate) -> bool:
    folder = f"objects/{'/'.join(fate.item.place)}"
    marker = f"{folder}/{REMOVING}"
    begun_s = time.time()  # unlike a monotonic clock, it goes on while the machine sleeps
    store.write(marker, b"{}")
    now = {key.removeprefix(f"{folder}/"): entry for key, entry in store.entries(folder).items()}
    if _without_marker(now) != _without_marker(fate.item.entries):
        store.delete(marker)
        return False
    for name in fate.goes:
        if time.time() - begun_s > LONGEST_S:
            return False
        if name != REMOVING:
            store.delete(f"{folder}/{name}")
    store.delete(marker)
    return True


def _without_marker(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    return {name: entry for name, entry in entries.items() if name != REMOVING}
