"""One object store for every stage: a plain directory or S3, with the same names, guarantees and errors.

A store is a root URI; keys are '/'-separated names below it. Two guarantees carry the artifacts: a written object is
whole or absent, and `create` lets exactly one of several writers succeed. How S3 is reached says `S3Settings`.
"""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from reflux.components.stores.s3_settings import S3Settings

__all__ = ["CHUNK_BYTES", "Entry", "S3Settings", "Store", "StoreError", "checked_key"]

CHUNK_BYTES = 8 << 20  # of one read, write or multipart part; bounds the memory of streams
_SEGMENT = re.compile(r"[^\x00-\x1f\x7f/\\]+")


class StoreError(OSError):
    """The store cannot be used: names the URI and the cause. A missing object is a FileNotFoundError instead."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a listing says of an object."""

    bytes: int
    modified_s: float
    """Unix time, by the clock of `Store.now_s`."""
    version: str
    """Another one means another content; the same one, most likely the same."""


class Store(ABC):
    """Objects below a root URI. Every error names it: FileNotFoundError, or StoreError with the cause."""

    uri: str
    where: str  # the URI, and the endpoint if there is one: for messages

    @staticmethod
    def open(uri: str, settings: S3Settings | None = None) -> Store:
        """A store at a directory, file://, s3://bucket/prefix or minio:// (KFP's name for s3); a query is dropped."""
        # imported here since both modules build on this one, and a directory needs no boto3
        parts = urlsplit(uri)
        if parts.scheme in ("s3", "minio"):
            from reflux.components.stores.s3_store import S3Store

            return S3Store(parts.netloc.rpartition("@")[2], parts.path.strip("/"), settings or S3Settings.of_store())
        from reflux.components.stores.local_store import LocalStore

        if parts.scheme == "file" and parts.netloc in ("", "localhost"):
            return LocalStore(Path(unquote(parts.path)))
        if "://" in uri or not uri:
            raise ValueError(f"store {uri!r}: allowed are a directory, file:///directory and s3://bucket/prefix")
        return LocalStore(Path(uri))

    @abstractmethod
    def chunks(self, key: str) -> Iterator[bytes]:
        """The bytes of an object, at most CHUNK_BYTES at a time."""

    @abstractmethod
    def open_input(self, key: str) -> Any:
        """A pyarrow NativeFile with random access. StoreError, when it is read, if the object was replaced since."""

    @abstractmethod
    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Some bytes of an object."""

    @abstractmethod
    def write_stream(self, key: str, stream: BinaryIO) -> None:
        """Store what the stream yields until its end, atomically."""

    @abstractmethod
    def write(self, key: str, data: bytes, *, settled: bool = True) -> None:
        """Store an object, atomically, replacing one of that name. If it is not `settled`, a power failure may lose it
        until `settle`; the death of a process does not.
        """

    @abstractmethod
    def settle(self, keys: Iterable[str]) -> None:
        """Make objects that were written without it survive a power failure."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> bool:
        """Store an object if there is none of that name, else False. Of several writers exactly one gets True."""

    @abstractmethod
    def entries(self, prefix: str = "") -> dict[str, Entry]:
        """Key -> what is known of the objects at `prefix` or below `prefix/`, in order of their keys."""

    @abstractmethod
    def now_s(self) -> float:
        """Unix time by the clock that dates the objects."""

    @abstractmethod
    def unfinished(self) -> dict[str, Entry]:
        """Writes that were begun and not ended, under names for `discard`: running ones, and what a kill left."""

    @abstractmethod
    def discard(self, name: str) -> None:
        """Remove an unfinished write. Its writer, if it still lives, fails."""

    @abstractmethod
    def size(self, key: str) -> int:
        """Bytes of an object."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object; nothing happens if there is none."""

    @abstractmethod
    def delete_prefix(self, prefix: str) -> None:
        """Remove every object below `prefix/`."""

    def read(self, key: str) -> bytes:
        return b"".join(self.chunks(key))

    def sha256(self, key: str) -> str:
        """Hex digest of an object, read as a stream."""
        digest = hashlib.sha256()
        for chunk in self.chunks(key):
            digest.update(chunk)
        return digest.hexdigest()

    def download(self, key: str, path: Path) -> str:
        """Copy an object to a file, which appears whole or not at all; its sha256, taken on the way."""
        digest = hashlib.sha256()
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as stream:
                for chunk in self.chunks(key):
                    digest.update(chunk)
                    stream.write(chunk)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        return digest.hexdigest()

    def upload(self, key: str, path: Path) -> str:
        """Copy a file into the store, atomically; its sha256, taken on the way."""
        with path.open("rb") as stream:
            hashing = _HashingReader(stream)
            self.write_stream(key, hashing)  # type: ignore[arg-type]
        return hashing.digest.hexdigest()

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Key -> bytes of the objects at `prefix` or below `prefix/`, in order of their keys."""
        return {key: entry.bytes for key, entry in self.entries(prefix).items()}

    def exists(self, key: str) -> bool:
        try:
            self.size(key)
        except FileNotFoundError:
            return False
        return True

    def list(self, prefix: str = "") -> list[str]:
        """Keys at `prefix` or below `prefix/`, sorted."""
        return [*self.entries(prefix)]

    def check_writable(self) -> None:
        """StoreError if it cannot be written, read or listed, or lets two writers create one object."""
        key = f"probe-{uuid.uuid4().hex}"
        try:
            outcome = [self.create(key, b"1"), self.create(key, b"2"), self.read(key), self.list(key)]
        except OSError as error:
            reason = str(error).removeprefix(f"store {self.where}: ")
            raise StoreError(f"store {self.where}: not writable ({reason})") from error
        finally:
            with suppress(OSError):
                self.delete(key)
        if outcome != [True, False, b"1", [key]]:
            raise StoreError(f"store {self.where}: no conditional writes, so runs could overwrite each other")


class _HashingReader:
    """A read-only, unseekable view of a file that hashes what is read: uploads take one pass and bounded memory."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.digest = stream, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self.stream.read(size)
        self.digest.update(data)
        return data


def checked_key(key: str) -> str:
    """Refuse a key that could leave the store's root or that a directory cannot hold."""
    segments = key.split("/")
    if not all(_SEGMENT.fullmatch(segment) and segment not in (".", "..") for segment in segments):
        raise ValueError(f"key {key!r}: '/'-separated names without '.', '..' or control characters are allowed")
    return key
