"""The read side of an artifact: every object is hashed before its content is handed on, a mismatch named."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from reflux.components import column_reads, tables
from reflux.components.canonical import sha256_hex
from reflux.components.provenance import ArtifactError, Manifest, Shard, checked_name, from_bytes
from reflux.components.storage import Store
from reflux.components.stores.local_store import LocalStore


def artifact_folder(stage: str, key: str) -> str:
    return f"objects/{checked_name(stage)}/{checked_name(key)}"


def manifest_key(stage: str, key: str) -> str:
    return f"{artifact_folder(stage, key)}/manifest.json"


def place(store: Store, key: str) -> str:
    """Where an object lies, as people write and copy it: the path in a directory, else the URI."""
    return str(store.path(key)) if isinstance(store, LocalStore) else f"{store.uri}/{key}"


class Artifact:
    """A committed artifact. A name means the shard of that name and every shard below `name/`, in name order."""

    def __init__(self, store: Store, manifest_bytes: bytes, name: str) -> None:
        self.store = store
        self.bytes = manifest_bytes
        self.record: Manifest = from_bytes(manifest_bytes, name)
        self.stage = self.record.stage
        self.key = self.record.key
        self.digest = self.record.digest
        self._verified: set[str] = set()  # objects of a directory that this instance has hashed

    @classmethod
    def open(cls, store: Store, stage: str, key: str) -> Artifact:
        """The artifact committed at stage and key. ArtifactError if there is none or its manifest was changed."""
        name = place(store, manifest_key(stage, key))
        try:
            artifact = cls(store, store.read(manifest_key(stage, key)), name)
        except FileNotFoundError as error:
            raise ArtifactError(f"{name}: no artifact was committed there") from error
        if (artifact.stage, artifact.key) != (stage, key):
            raise ArtifactError(f"{name}: holds the manifest of another artifact, {artifact.stage}/{artifact.key}")
        return artifact

    @classmethod
    def load(cls, store: Store, manifest_bytes: bytes) -> Artifact:
        """The artifact of a manifest that came by another way: it must equal the one committed in the store."""
        given = cls(store, manifest_bytes, "the manifest that was handed over")
        committed = cls.open(store, given.stage, given.key)
        if committed.bytes != manifest_bytes:
            raise ArtifactError(f"{committed.place}: is not the manifest that was handed over, of {given.digest}")
        return committed

    @property
    def uri(self) -> str:
        return f"{self.store.uri}/{manifest_key(self.stage, self.key)}"

    @property
    def place(self) -> str:
        """The same for messages."""
        return place(self.store, manifest_key(self.stage, self.key))

    @property
    def manifest(self) -> dict[str, Any]:
        """The in-toto statement."""
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
        """Shards named `prefix` or below `prefix/` ("": all of them), in name order."""
        return [s for s in self.record.shards if not prefix or s.name == prefix or s.name.startswith(f"{prefix}/")]

    def table(self, name: str, columns: list[str] | None = None) -> pa.Table:
        """All rows of the shards of that name, in memory; of large ones, only the columns pass the network."""
        return pa.concat_tables(self._read(shard, columns) for shard in self._some(name))

    def batches(self, name: str, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The same rows as a stream, a row group at a time, which is fetched when its batch is asked for.

        From S3, a small shard and one that is read in all its columns lie in a temporary file meanwhile.
        """
        for shard in self._some(name):
            if self._in_parts(shard, columns):
                yield from tables.groups(shard.name, self._parquet(shard), columns)
            else:
                with self._on_disk(shard) as path:
                    yield from tables.batches(shard.name, path, columns)

    def schema_metadata(self, name: str) -> dict[str, str]:
        """What the writer put into the tables' schema metadata (fingerprints, sampling contract), from the manifest."""
        first, *rest = self._some(name)
        for shard in rest:
            if shard.metadata != first.metadata:
                raise ArtifactError(
                    f"{self.place}: shards {first.name} and {shard.name} carry different schema metadata"
                )
        return dict(first.metadata)

    def file(self, name: str) -> bytes:
        """The bytes of one shard."""
        return read_verified(self.store, self._one(name))

    def download(self, name: str, path: Path) -> None:
        """Copy one shard to a file, which appears only if it verifies."""
        download_verified(self.store, self._one(name), path)

    def download_all(self, prefix: str, folder: Path) -> None:
        """Copy the shards of a prefix ("": all of them) to folder/<name>."""
        for shard in self._some(prefix):
            download_verified(self.store, shard, folder / shard.name)

    def _some(self, name: str) -> list[Shard]:
        if found := self.shards(name):
            return found
        raise ArtifactError(
            f"{self.place}: has no shard {name!r}; it has {[shard.name for shard in self.record.shards]}"
        )

    def _one(self, name: str) -> Shard:
        found = self._some(name)
        if found[0].name != name:  # a name sorts before those below it
            raise ArtifactError(f"{self.place}: {name!r} is several shards; ask for one of {[s.name for s in found]}")
        return found[0]

    def _read(self, shard: Shard, columns: list[str] | None) -> pa.Table:
        if self._in_parts(shard, columns):
            return pa.Table.from_batches(tables.groups(shard.name, self._parquet(shard), columns))
        return tables.read(shard.name, pa.BufferReader(read_verified(self.store, shard)), columns)

    def _in_parts(self, shard: Shard, columns: list[str] | None) -> bool:
        """Whether to fetch columns by themselves: a directory gives its pages faster than they can be hashed apart."""
        return bool(shard.parts) and columns is not None and not isinstance(self.store, LocalStore)

    def _parquet(self, shard: Shard) -> pq.ParquetFile:
        return column_reads.open_parquet(self.store, shard, place(self.store, shard.object))

    @contextmanager
    def _on_disk(self, shard: Shard) -> Iterator[Path]:
        """A verified local file with the shard's bytes: in a directory the object itself, else a temporary copy."""
        if isinstance(self.store, LocalStore):
            if shard.object not in self._verified:
                verify_object(self.store, shard)
                self._verified.add(shard.object)
            yield self.store.path(shard.object)
            return
        with tempfile.TemporaryDirectory(prefix="reflux-") as folder:
            path = Path(folder, "shard")
            download_verified(self.store, shard, path)
            yield path


def verify_object(store: Store, shard: Shard) -> None:
    """Hash an object as it lies in the store. ArtifactError, naming it, if it is missing or was changed."""
    with _missing_named(store, shard):
        _require(store, shard, store.sha256(shard.object))


def read_verified(store: Store, shard: Shard) -> bytes:
    with _missing_named(store, shard):
        data = store.read(shard.object)
    _require(store, shard, sha256_hex(data))
    return data


def download_verified(store: Store, shard: Shard, path: Path) -> None:
    partial = path.with_name(f".{path.name}.unverified")
    try:
        with _missing_named(store, shard):
            _require(store, shard, store.download(shard.object, partial))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _missing_named(store: Store, shard: Shard) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise ArtifactError(f"{place(store, shard.object)}: missing (shard {shard.name})") from error


def _require(store: Store, shard: Shard, sha256: str) -> None:
    if sha256 != shard.sha256:
        name = place(store, shard.object)
        raise ArtifactError(f"{name}: changed (shard {shard.name}): sha256 {sha256}, its manifest says {shard.sha256}")
