"""The read side of an artifact: every object is hashed before its content is handed on, and a mismatch is an error that names it."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from reflux.components import tables
from reflux.components.local_store import LocalStore
from reflux.components.provenance import ArtifactError, Manifest, Shard, checked_name, from_bytes
from reflux.components.storage import Store


def artifact_folder(stage: str, key: str) -> str:
    return f"objects/{checked_name(stage)}/{checked_name(key)}"


def manifest_key(stage: str, key: str) -> str:
    return f"{artifact_folder(stage, key)}/manifest.json"


class Artifact:
    """A committed artifact. Names address shards: `traces` means the shard `traces` and every shard below `traces/`, in name order."""

    def __init__(self, store: Store, manifest_bytes: bytes, name: str) -> None:
        self.store = store
        self.bytes = manifest_bytes
        self.record: Manifest = from_bytes(manifest_bytes, f"{store.uri}/{name}")
        self.stage = self.record.stage
        self.key = self.record.key
        self.digest = self.record.digest
        self._verified: set[str] = set()  # objects in a directory are hashed once per artifact that was opened

    @classmethod
    def open(cls, store: Store, stage: str, key: str) -> Artifact:
        """The artifact committed at stage and key. ArtifactError if there is none or its manifest was changed."""
        name = manifest_key(stage, key)
        try:
            data = store.read(name)
        except FileNotFoundError as error:
            raise ArtifactError(f"{store.uri}/{name}: no artifact was committed there") from error
        artifact = cls(store, data, name)
        if (artifact.stage, artifact.key) != (stage, key):
            raise ArtifactError(f"{store.uri}/{name}: holds the manifest of {artifact.stage}/{artifact.key}")
        return artifact

    @classmethod
    def load(cls, store: Store, manifest_bytes: bytes) -> Artifact:
        """The artifact of a manifest that came by another way; it must equal the one committed in the store."""
        given = cls(store, manifest_bytes, "manifest")
        committed = cls.open(store, given.stage, given.key)
        if committed.bytes != manifest_bytes:
            name = manifest_key(given.stage, given.key)
            raise ArtifactError(
                f"{store.uri}/{name}: differs from the manifest that was handed over ({committed.digest} and {given.digest})"
            )
        return committed

    @property
    def uri(self) -> str:
        return f"{self.store.uri}/{manifest_key(self.stage, self.key)}"

    @property
    def manifest(self) -> dict[str, Any]:
        """The in-toto statement."""
        import json

        return json.loads(self.bytes)

    @property
    def config(self) -> dict[str, Any]:
        """Key and other fields of the stage's configuration; whole numbers are ints."""
        return {**self.record.key_fields, **self.record.other_fields}

    @property
    def parents(self) -> dict[str, str]:
        """Name -> digest of the artifacts that this one was made from."""
        return {name: parent.digest for name, parent in self.record.parents.items()}

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self.record.metrics)

    def shards(self, prefix: str = "") -> list[Shard]:
        """Shards named `prefix` or below `prefix/`, in name order."""
        return [s for s in self.record.shards if not prefix or s.name == prefix or s.name.startswith(f"{prefix}/")]

    def table(self, name: str, columns: list[str] | None = None) -> pa.Table:
        """All rows of the shards of that name, in memory."""
        return pa.concat_tables(self._table(shard, columns) for shard in self._some(name))

    def batches(self, name: str, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The same rows as a stream, a row group at a time; the shard being read lies on disk, not in memory."""
        for shard in self._some(name):
            with self._on_disk(shard) as path:
                yield from tables.batches(shard.name, path, columns)

    def schema_metadata(self, name: str) -> dict[str, str]:
        """What the writer put into the schema's metadata (fingerprints, sampling contract), read from the manifest."""
        first, *rest = self._some(name)
        for shard in rest:
            if shard.metadata != first.metadata:
                raise ArtifactError(f"{self.uri}: shards {first.name} and {shard.name} carry different schema metadata")
        return dict(first.metadata)

    def file(self, name: str) -> bytes:
        """The bytes of one shard."""
        return read_verified(self.store, self._one(name))

    def download(self, name: str, path: Path) -> None:
        """Copy one shard to a file, which appears only if it verifies."""
        download_verified(self.store, self._one(name), path)

    def download_all(self, prefix: str, folder: Path) -> None:
        """Copy the shards of a prefix ("" for all) to folder/<name>."""
        for shard in self.shards(prefix) if not prefix else self._some(prefix):
            download_verified(self.store, shard, folder / shard.name)

    def _some(self, name: str) -> list[Shard]:
        found = self.shards(name)
        if not found:
            raise ArtifactError(
                f"{self.uri}: has no shard {name!r}; it has {[shard.name for shard in self.record.shards]}"
            )
        return found

    def _one(self, name: str) -> Shard:
        found = [shard for shard in self._some(name) if shard.name == name]
        if not found:
            raise ArtifactError(
                f"{self.uri}: {name!r} is a group of shards; ask for one of {[s.name for s in self.shards(name)]}"
            )
        return found[0]

    def _table(self, shard: Shard, columns: list[str] | None) -> pa.Table:
        return tables.read(shard.name, pa.BufferReader(read_verified(self.store, shard)), columns)

    @contextmanager
    def _on_disk(self, shard: Shard) -> Iterator[Path]:
        """A verified local file with the shard's bytes: the object itself in a directory, a temporary copy from S3."""
        if isinstance(self.store, LocalStore):
            if shard.object not in self._verified:
                require_verified(self.store, shard, hash_object(self.store, shard))
                self._verified.add(shard.object)
            yield self.store.path(shard.object)
            return
        with tempfile.TemporaryDirectory(prefix="reflux-") as folder:
            path = Path(folder, "shard")
            download_verified(self.store, shard, path)
            yield path


def read_verified(store: Store, shard: Shard) -> bytes:
    try:
        data = store.read(shard.object)
    except FileNotFoundError as error:
        raise _missing(store, shard) from error
    require_verified(store, shard, hashlib.sha256(data).hexdigest())
    return data


def download_verified(store: Store, shard: Shard, path: Path) -> None:
    partial = path.with_name(f".{path.name}.unverified")
    try:
        require_verified(store, shard, store.download(shard.object, partial))
        partial.replace(path)
    except FileNotFoundError as error:
        raise _missing(store, shard) from error
    finally:
        partial.unlink(missing_ok=True)


def hash_object(store: Store, shard: Shard) -> str:
    """sha256 of the object as it lies in the store."""
    try:
        return store.sha256(shard.object)
    except FileNotFoundError as error:
        raise _missing(store, shard) from error


def require_verified(store: Store, shard: Shard, sha256: str) -> None:
    if sha256 != shard.sha256:
        raise ArtifactError(
            f"{store.uri}/{shard.object}: shard {shard.name} was changed: sha256 {sha256}, its manifest says {shard.sha256}"
        )


def _missing(store: Store, shard: Shard) -> ArtifactError:
    return ArtifactError(f"{store.uri}/{shard.object}: shard {shard.name} is missing")
