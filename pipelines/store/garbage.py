"""What a store may lose: a plan from facts alone, so that it can be shown before anything is removed, and tested.

Kept is what a kept run or `--keep` leads to through the parents in the manifests, what anybody touched within the grace
period with all that it was made from, and unfinished work that an unfinished run can still use. The rest goes. Nothing
here reads or writes a store: inventory.py gathers the facts, removal.py carries a plan out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from reflux.components.artifact_writer import REMOVING
from reflux.components.storage import Entry

Place = tuple[str, str]
"""stage and key"""
MANIFEST = "manifest.json"
_LEFT = re.compile(r"probe-[0-9a-f]{32}|tracking/[^/]+/[0-9a-f]{64}")  # by a killed check of the store, by run_tree


@dataclass(frozen=True, kw_only=True)
class Item:
    """All objects of one artifact, or of attempts at it."""

    place: Place
    entries: Mapping[str, Entry]
    """Name below objects/<stage>/<key>/ -> object."""
    digest: str = ""
    """"" while it is not committed."""
    parents: frozenset[Place] | None = frozenset()
    """What it was or is being made from; None if that cannot be told."""
    listed: frozenset[str] = frozenset()
    """Names of the objects that its manifest lists."""
    damage: str = ""
    """Why its manifest cannot be read."""

    @property
    def committed(self) -> bool:
        return MANIFEST in self.entries

    @property
    def touched_s(self) -> float:
        return max((e.modified_s for name, e in self.entries.items() if name != REMOVING), default=0.0)


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """What a store held at one moment, by its own clock."""

    now_s: float
    items: Mapping[Place, Item]
    unfinished: Mapping[str, Entry] = field(default_factory=dict)
    """Writes that were begun and not ended."""
    others: Mapping[str, Entry] = field(default_factory=dict)
    """Objects that belong to no artifact."""


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """A run that can be continued: what it has so far, by stage."""

    run: str
    artifacts: Mapping[str, str]
    """stage -> key"""


@dataclass(frozen=True, kw_only=True)
class Fate:
    """What becomes of an item."""

    item: Item
    kept_for: tuple[str, ...]
    """Reasons in words; none: all of it goes."""
    goes: tuple[str, ...]
    """Names of its objects that go, in the order in which they have to."""

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.item.entries.values())

    @property
    def goes_bytes(self) -> int:
        return sum(self.item.entries[name].bytes for name in self.goes)


@dataclass(frozen=True, kw_only=True)
class Plan:
    fates: tuple[Fate, ...]
    """Of every item, children before what they were made from."""
    discarded: tuple[str, ...]
    """Unfinished writes that go."""
    removed: tuple[str, ...]
    """Objects outside artifacts that go."""
    remarks: tuple[str, ...]
    """What a kept run refers to and the store does not have."""


def plan(
    inventory: Inventory, roots: Mapping[str, Sequence[Place]], unfinished: Sequence[Unfinished], grace_s: float
) -> Plan:
    """What goes and what stays. `roots`: reason in words -> the artifacts that are kept for it.

    ValueError if an artifact that is kept cannot be read, since what it was made from would go.
    """
    old = inventory.now_s - grace_s
    reasons: dict[Place, set[str]] = {}
    remarks: list[str] = []
    for reason, places in roots.items():
        _spread(inventory, reasons, remarks, reason, places)
    recent = f"touched within {grace_s / 3600:g} h, or an input of what was"
    _spread(inventory, reasons, remarks, recent, [p for p, item in inventory.items.items() if item.touched_s > old])
    for run in unfinished:
        waiting = [place for place, item in inventory.items.items() if _continues(run, item)]
        _spread(inventory, reasons, remarks, f"work of run {run.run}, which is unfinished", waiting)
    fates = [
        Fate(item=item, kept_for=tuple(sorted(reasons.get(place, ()))), goes=_going(item, place in reasons, old))
        for place, item in sorted(inventory.items.items(), key=lambda pair: -pair[1].touched_s)
    ]
    return Plan(
        fates=tuple(fates),
        discarded=tuple(name for name, entry in inventory.unfinished.items() if entry.modified_s <= old),
        removed=tuple(
            name for name, entry in inventory.others.items() if _LEFT.fullmatch(name) and entry.modified_s <= old
        ),
        remarks=tuple(dict.fromkeys(remarks)),
    )


def _spread(
    inventory: Inventory, reasons: dict[Place, set[str]], remarks: list[str], reason: str, places: Sequence[Place]
) -> None:
    """Give the reason to these artifacts and to everything that they were made from."""
    waiting = list(places)
    while waiting:
        place = waiting.pop()
        item = inventory.items.get(place)
        if item is None:
            remarks.append(f"{reason}: {place[0]} {place[1][:12]}… is not in this store")
        elif reason not in reasons.setdefault(place, set()):
            reasons[place].add(reason)
            if item.damage:
                raise ValueError(f"{item.damage}; it is kept ({reason}), so what it was made from must be known")
            waiting.extend(item.parents or ())


def _continues(run: Unfinished, item: Item) -> bool:
    """Whether an attempt may be one of this run, which has no artifact of that stage yet but all of its inputs."""
    if item.committed or item.place[0] in run.artifacts:
        return False
    return item.parents is None or item.parents <= set(run.artifacts.items())


def _going(item: Item, kept: bool, old: float) -> tuple[str, ...]:
    if not kept:
        return tuple(sorted(item.entries, key=lambda name: (name != MANIFEST, name)))  # without it, nothing is promised
    if not item.committed or item.touched_s > old:  # somebody may be at work in it
        return ()
    return tuple(sorted(name for name in item.entries if name != MANIFEST and name not in item.listed))
