"""The facts on which garbage.py decides: what lies in a store, and what this project's runs and people want kept."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from reflux.components.artifact_writer import ATTEMPT
from reflux.components.artifacts import Artifact, ArtifactError, manifest_key
from reflux.components.provenance import Manifest
from reflux.components.storage import Entry, Store
from reflux.pipelines import runs
from reflux.pipelines.store.garbage import MANIFEST, Inventory, Item, Place, Unfinished


def take(store: Store) -> Inventory:
    """Everything below the store's root, with the manifests read."""
    folders: dict[Place, dict[str, Entry]] = defaultdict(dict)
    others = {}
    for key, entry in store.entries().items():
        parts = key.split("/", 3)
        if parts[0] == "objects" and len(parts) == 4:
            folders[parts[1], parts[2]][parts[3]] = entry
        else:
            others[key] = entry
    return Inventory(
        now_s=store.now_s(),
        items={place: _item(store, place, entries) for place, entries in folders.items()},
        unfinished=store.unfinished(),
        others=others,
    )


def roots_of_runs(data_dir: Path, keep_last: int | None) -> tuple[dict[str, list[Place]], list[Unfinished]]:
    """Reason -> artifacts, for the newest runs (None: for all), and those of them that can be continued."""
    records = runs.all_records(data_dir)[:keep_last]
    roots = {
        f"run {record.run}": [(stage, artifact["key"]) for stage, artifact in record.artifacts.items()]
        for record in records
    }
    unfinished = [
        Unfinished(run=record.run, artifacts={stage: artifact["key"] for stage, artifact in record.artifacts.items()})
        for record in records
        if record.status != "finished"
    ]
    return roots, unfinished


def roots_of_names(inventory: Inventory, store: Store, names: Sequence[str], data_dir: Path) -> dict[str, list[Place]]:
    """The same for `--keep`: digests, folders of bundles, runs. ValueError for a name that leads to nothing here."""
    roots = {}
    for name in names:
        places = _named(inventory, store, name, data_dir)
        if not any(place in inventory.items for place in places):
            raise ValueError(f"--keep {name}: the store has no such artifact")
        roots[f"--keep {name}"] = places
    return roots


def _named(inventory: Inventory, store: Store, name: str, data_dir: Path) -> list[Place]:
    if name.startswith("sha256:"):
        return [place for place, item in inventory.items.items() if item.digest == name]
    manifest = Path(name) / MANIFEST
    if manifest.is_file():
        bundle = Artifact(store, manifest.read_bytes(), str(manifest))
        return [(bundle.stage, bundle.key)]
    record = runs.read(runs.find(name, data_dir))
    return [(stage, artifact["key"]) for stage, artifact in record.artifacts.items()]


def _item(store: Store, place: Place, entries: dict[str, Entry]) -> Item:
    if MANIFEST not in entries:
        return Item(place=place, entries=entries, parents=_inputs(store, place, entries))
    try:
        record = Artifact.open(store, *place).record
    except (ArtifactError, ValueError) as error:
        return Item(place=place, entries=entries, parents=None, damage=str(error))
    return Item(
        place=place, entries=entries, digest=record.digest, parents=_parents(record),
        listed=frozenset(shard.object.split("/", 3)[3] for shard in record.shards),
    )  # fmt: skip


def _parents(record: Manifest) -> frozenset[Place]:
    return frozenset((parent.stage, parent.key) for parent in record.parents.values())


def _inputs(store: Store, place: Place, entries: dict[str, Entry]) -> frozenset[Place] | None:
    """What the attempt says that it works on; None if it says nothing."""
    if ATTEMPT not in entries:
        return None
    try:
        said = json.loads(store.read(manifest_key(*place).replace(MANIFEST, ATTEMPT)))
        return frozenset((str(stage), str(key)) for stage, key in said["parents"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
