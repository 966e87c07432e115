"""The write side of an artifact: shards first, manifest last, and a killed attempt goes on from what verifies.

Everything lies below objects/<stage>/<key>/: shards under the sha256 of their bytes; attempt.json, which says that
somebody works on the key, pending/<name>.json, which says that an attempt wrote a shard, checkpoints/ and failures/,
all removed at commit; manifest.json, created once and never replaced, without which there is no artifact.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa

from reflux.components import column_reads, environment, tables
from reflux.components.artifact_reader import (
    Artifact,
    artifact_folder,
    manifest_key,
    place,
    read_verified,
    verify_object,
)
from reflux.components.canonical import canonical, sha256_hex
from reflux.components.checkpoints import Checkpoints
from reflux.components.provenance import (
    ArtifactError,
    Manifest,
    Parent,
    Shard,
    SourceReference,
    checked_name,
    public_uri,
    to_bytes,
)
from reflux.components.sources import Source
from reflux.components.storage import Store

log = logging.getLogger(__name__)
ATTEMPT = "attempt.json"
"""Says that somebody works on a key, and what its parents are; its age says when the artifact was last asked for."""
FAILURES = "failures"
"""Below it, as checkpoints are, what a stage kept of steps that it could not make."""
REMOVING = "removing.json"
"""Says that a garbage collection removes what is in the folder."""
REMOVING_S = 3600.0
"""A removal takes minutes; one that is older was killed."""


class Writer:
    """Writes the artifact that one stage makes from one set of inputs; its key is known before any work is done."""

    def __init__(
        self,
        store: Store,
        *,
        stage: str,
        version: str,
        key_fields: Mapping[str, Any],
        other_fields: Mapping[str, Any],
        parents: Mapping[str, Artifact],
        sources: Mapping[str, Source],
        platform: Mapping[str, str] | None = None,  # what only the caller knows, e.g. CPU capability and thread count
    ) -> None:
        self.store = store
        self._sources = dict(sources)
        self._draft = Manifest(
            stage=checked_name(stage),
            version=version,
            key_fields=dict(key_fields),
            other_fields={
                name: public_uri(value) if isinstance(value, str) else value for name, value in other_fields.items()
            },
            parents={name: Parent(stage=a.stage, key=a.key, digest=a.digest) for name, a in parents.items()},
            sources={name: SourceReference(uri=public_uri(s.uri), digest=s.digest) for name, s in sources.items()},
            versions=environment.versions(),
            platform=environment.machine() | dict(platform or {}),
            started=environment.now(),
        )
        self.stage = stage
        self.key = self._draft.key
        self._folder = artifact_folder(stage, self.key)
        self._checkpoints = Checkpoints(store, f"{self._folder}/checkpoints")
        self._shards: dict[str, Shard] = {}

    def source(self, field: str) -> Path:
        """The local file or folder behind a source field of the configuration."""
        return self._given(field).path

    def source_digest(self, field: str) -> str:
        """The digest of its content: what a stage writes down when it names what its rows were made from."""
        return self._given(field).digest

    def existing(self) -> Artifact | None:
        """The committed artifact of this key, if all its objects exist in the right size.

        The key counts as in use from here on. ArtifactError if it is being removed, or if its manifest was changed:
        such an artifact is neither used nor silently made again.
        """
        self._claim()
        if not self.store.exists(manifest_key(self.stage, self.key)):
            return None
        artifact = Artifact.open(self.store, self.stage, self.key)
        return None if _absent(artifact) else artifact

    def done(self, name: str) -> bool:
        """Whether the shard is written: by this attempt, or by a killed one if its object has the recorded sha256."""
        if name in self._shards:
            return True
        try:
            shard = _parse_pointer(name, self.store.read(self._pointer(name)))
            verify_object(self.store, shard)
        except (FileNotFoundError, ArtifactError):  # never written, or not whole: the stage makes it again
            return False
        self._shards[name] = shard
        return True

    def write_table(self, name: str, table: pa.Table, schema: pa.Schema, *, measured: bool = False) -> None:
        """Write rows as a Parquet shard, with the schema's metadata. ValueError names a column that breaks it."""
        data = tables.encode(name, table, schema)
        shard = self._shard(name, hashlib.sha256(data).hexdigest(), len(data), ".parquet", measured)
        shard = replace(
            shard, rows=table.num_rows, schema=tables.fingerprint(schema), metadata=tables.metadata(schema),
            parts=column_reads.parts(data),
        )  # fmt: skip
        if not self._stored(shard):
            self.store.write(shard.object, data.to_pybytes(), settled=False)
        self._point(shard)

    def write_file(self, name: str, content: Path | bytes, *, measured: bool = False) -> None:
        """Write a file or bytes as one shard; the object keeps the name's extension. A file is streamed."""
        suffix = PurePosixPath(name).suffix or ".bin"
        if isinstance(content, bytes):
            shard = self._shard(name, sha256_hex(content), len(content), suffix, measured)
            if not self._stored(shard):
                self.store.write(shard.object, content)
        else:
            with content.open("rb") as stream:
                sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
            shard = self._shard(name, sha256, content.stat().st_size, suffix, measured)
            if not self._stored(shard) and self.store.upload(shard.object, content) != sha256:
                self.store.delete(shard.object)
                raise ArtifactError(f"shard {name}: {content} changed while it was being written")
        self._point(shard)

    def inherit(self, parent: Artifact, shard: Shard) -> None:
        """List a shard of a parent as one of this artifact's, under the same name. Its object stays where it lies."""
        assert (parent.stage, parent.key) in {(p.stage, p.key) for p in self._draft.parents.values()}
        if shard.name in self._shards:
            raise ValueError(f"shard {shard.name}: written twice")
        self._shards[shard.name] = shard

    def pending_table(self, name: str) -> pa.Table:
        """Read back a table of this attempt."""
        if not self.done(name):
            raise ArtifactError(f"{place(self.store, self._folder)}: this attempt has written no shard {name!r}")
        return tables.read(name, pa.BufferReader(read_verified(self.store, self._shards[name])), None)

    def save_checkpoint(self, step: int, files: Mapping[str, Path]) -> None:
        """Keep files for a later attempt, all of them or none; the last two checkpoints are kept."""
        self._checkpoints.save(step, files)

    def latest_checkpoint(self, into: Path, wanted: Callable[[str], bool] = lambda name: True) -> int | None:
        """Fetch the `wanted` files of the newest checkpoint that verifies into a folder; its step, or None."""
        return self._checkpoints.latest(into, wanted)

    def keep_failure(self, step: int, files: Mapping[str, Path]) -> str:
        """Keep files of a step that failed, all of them or none, until the artifact is made; where they lie."""
        Checkpoints(self.store, f"{self._folder}/{FAILURES}").save(step, files)
        return f"{self._folder}/{FAILURES}"

    def commit(self, metrics: Mapping[str, float]) -> Artifact:
        """Make the shards an artifact. If another attempt was first, its artifact is returned instead."""
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise ValueError(f"metric {name} is {value}: only finite numbers can be recorded")
        if not self._shards:
            raise ValueError(f"stage {self.stage}: commit without a single shard")
        manifest = replace(
            self._draft,
            shards=tuple(self._shards[name] for name in sorted(self._shards)),
            metrics={name: float(value) for name, value in metrics.items()},
            finished=environment.now(),
        )
        own = [shard.object for shard in manifest.shards if shard.object.startswith(f"{self._folder}/")]
        self.store.settle(own)
        created = self.store.create(manifest_key(self.stage, self.key), to_bytes(manifest))
        artifact = Artifact.open(self.store, self.stage, self.key)
        if absent := _absent(artifact):
            raise ArtifactError(
                f"{artifact.place}: was committed before, objects it lists are missing ({', '.join(absent)}), and "
                f"making them again gave others; remove {self._folder} from the store to make the artifact anew"
            )
        if not created and artifact.digest != manifest.digest:
            message = "%s: another attempt was first with %s; this one made %s, which is dropped"
            log.warning(message, artifact.place, artifact.digest, manifest.digest)
        listed = {shard.object for shard in artifact.record.shards}
        for name in own:
            if name not in listed:  # times are never the same twice, so the loser of a race has some of its own
                self.store.delete(name)
        self.store.delete_prefix(f"{self._folder}/pending")
        self.store.delete_prefix(f"{self._folder}/{FAILURES}")
        self._checkpoints.clear()
        self.store.delete(f"{self._folder}/{ATTEMPT}")
        return artifact

    def _claim(self) -> None:
        """Say that the key and its parents are in use, and only then look whether a garbage collection removes them.

        It works the other way round (pipelines/store/removal.py), so of two that meet at least one sees the other.
        """
        parents = sorted([parent.stage, parent.key] for parent in self._draft.parents.values())
        self.store.write(f"{self._folder}/{ATTEMPT}", canonical({"parents": parents}))
        marker = f"{self._folder}/{REMOVING}"
        found = self.store.entries(marker)
        if marker not in found:
            return
        if self.store.now_s() - found[marker].modified_s < REMOVING_S:
            self.store.delete(f"{self._folder}/{ATTEMPT}")
            raise ArtifactError(f"{place(self.store, self._folder)}: `reflux store gc` is removing it; try again later")
        self.store.delete(marker)  # of one that was killed

    def _given(self, field: str) -> Source:
        if field not in self._sources:
            raise ValueError(f"{field}: no source was given; given are {sorted(self._sources)}")
        return self._sources[field]

    def _shard(self, name: str, sha256: str, size: int, suffix: str, measured: bool) -> Shard:
        if name in self._shards:
            raise ValueError(f"shard {name}: written twice")
        object_key = f"{self._folder}/{sha256}{suffix}"
        return Shard(name=checked_name(name), object=object_key, sha256=sha256, bytes=size, measured=measured)

    def _stored(self, shard: Shard) -> bool:
        """Whether the object is there and whole, from a killed attempt or another writer: then it is left alone."""
        return self.store.exists(shard.object) and self.store.sha256(shard.object) == shard.sha256

    def _point(self, shard: Shard) -> None:
        record = asdict(shard)
        pointer = {"shard": record, "sha256": sha256_hex(canonical(record))}
        self.store.write(self._pointer(shard.name), canonical(pointer), settled=False)
        self._shards[shard.name] = shard

    def _pointer(self, name: str) -> str:
        return f"{self._folder}/pending/{checked_name(name)}.json"


def _parse_pointer(name: str, data: bytes) -> Shard:
    try:
        pointer = json.loads(data)
        if pointer["shard"]["name"] != name or pointer["sha256"] != sha256_hex(canonical(pointer["shard"])):
            raise ValueError("its digest does not match")
        return Shard(**pointer["shard"])
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"pending shard {name}: {error}") from error


def _absent(artifact: Artifact) -> list[str]:
    """Objects that the manifest lists and that are not there in the right size."""
    folders = {artifact_folder(artifact.stage, artifact.key)} | {
        s.object.rpartition("/")[0] for s in artifact.record.shards
    }
    sizes = {name: size for folder in folders for name, size in artifact.store.sizes(folder).items()}
    return [shard.object for shard in artifact.record.shards if sizes.get(shard.object) != shard.bytes]
