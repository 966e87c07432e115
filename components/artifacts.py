"""Artifacts: what a stage reads (`Artifact`) and writes (`Writer`), and the check of a whole one (`verify`).

An artifact is a manifest (provenance.py) at objects/<stage>/<key>/manifest.json of a store, and the shards it lists.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from reflux.components.artifact_reader import Artifact, manifest_key, place, verify_object
from reflux.components.artifact_writer import Writer
from reflux.components.provenance import ArtifactError, Shard, from_bytes
from reflux.components.storage import Store

__all__ = ["Artifact", "ArtifactError", "Shard", "Writer", "manifest_key", "parents", "place", "verify", "verify_copy"]


def verify(store: Store, stage: str, key: str, seen: set[tuple[str, str]] | None = None) -> list[str]:
    """Hash every object of an artifact again. A line for each that is missing or changed; none: it is sound.

    The manifest is one of the objects: its own digest, the key and the content digest are recomputed too. `seen` are
    the objects, each with the sha256 that it should have, that were looked at for other artifacts, and are not again:
    one can be part of several. Those of this one are added.
    """
    seen = set() if seen is None else seen
    try:
        artifact = Artifact.open(store, stage, key)
    except ArtifactError as error:
        return [str(error)]
    problems = []
    for shard in artifact.record.shards:
        if (shard.object, shard.sha256) in seen:
            continue
        seen.add((shard.object, shard.sha256))
        try:
            verify_object(store, shard)
        except ArtifactError as error:
            problems.append(str(error))
    return problems


BESIDE_A_COPY = {"manifest.json", "store.json", "calibration_report.json"}
"""Files of a bundle's folder that are not shards: what it is, where it belongs, what calibrate.py wrote there."""


def verify_copy(folder: Path) -> list[str]:
    """The same for a folder that holds manifest.json and the shards under their names, as download_all writes them."""
    path = folder / "manifest.json"
    try:
        manifest = from_bytes(path.read_bytes(), str(path))
    except FileNotFoundError:
        return [f"{path}: missing"]
    except ArtifactError as error:
        return [str(error)]
    problems = []
    for shard in manifest.shards:
        file = folder / shard.name
        if not file.is_file():
            problems.append(f"{file}: missing")
            continue
        with file.open("rb") as stream:
            actual = hashlib.file_digest(stream, "sha256").hexdigest()
        if actual != shard.sha256:
            problems.append(f"{file}: changed: sha256 {actual}, its manifest says {shard.sha256}")
    known = {shard.name for shard in manifest.shards} | BESIDE_A_COPY
    files = (file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    extra = sorted(name for file in files if (name := file.relative_to(folder).as_posix()) not in known)
    return problems + [f"{folder / name}: is not in the manifest" for name in extra]


def parents(artifact: Artifact) -> dict[str, Artifact]:
    """The artifacts that this one was made from. ArtifactError if one is missing or is no longer what it was."""
    found = {}
    for name, parent in artifact.record.parents.items():
        found[name] = Artifact.open(artifact.store, parent.stage, parent.key)
        if found[name].digest != parent.digest:
            raise ArtifactError(
                f"{found[name].place}: is {found[name].digest}, but {artifact.place} was made from {parent.digest}"
            )
    return found
