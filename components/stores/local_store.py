"""A store in a plain directory, for one machine without a server: rename and hard links give S3's guarantees."""

from __future__ import annotations

import errno
import io
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from pyarrow import fs

from reflux.components.storage import CHUNK_BYTES, Entry, Store, StoreError, checked_key

_PARTIAL = ".partial"  # folder of unfinished writes: same file system as the objects, and no object itself
_ATTEMPTS = 3


class LocalStore(Store):
    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()
        self.uri = self.where = self.root.as_uri()

    def path(self, key: str) -> Path:
        return self.root / checked_key(key)

    def chunks(self, key: str) -> Iterator[bytes]:
        with self._explained(key), self.path(key).open("rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                yield chunk

    def open_input(self, key: str) -> Any:
        with self._explained(key):
            return fs.LocalFileSystem().open_input_file(str(self.path(key)))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        with self._explained(key), self.path(key).open("rb") as stream:
            stream.seek(start)
            return stream.read(length)

    def write_stream(self, key: str, stream: BinaryIO) -> None:
        with self._explained(key):
            self._put(key, stream, os.replace)

    def write(self, key: str, data: bytes, *, settled: bool = True) -> None:
        with self._explained(key):
            self._put(key, io.BytesIO(data), os.replace, settled=settled)

    def settle(self, keys: Iterable[str]) -> None:
        """After the first sync the others find little to do: many files at once cost less than one at a time."""
        paths = [self.path(key) for key in keys]
        for path in [*paths, *sorted({path.parent for path in paths})]:
            with self._explained(path.name):
                _sync(path)

    def create(self, key: str, data: bytes) -> bool:
        with self._explained(key):
            if self.path(key).exists():  # the common case, decided without writing; the link decides the races
                return False
            try:
                self._put(key, io.BytesIO(data), os.link)  # unlike rename, it never replaces
            except FileExistsError as error:
                if error.filename2 is None:  # not the link: a file stands where a folder is needed
                    raise
                return False
            return True

    def entries(self, prefix: str = "") -> dict[str, Entry]:
        prefix = prefix.strip("/")
        start = self.path(prefix) if prefix else self.root
        with self._explained(prefix):
            if start.is_file():
                return {prefix: _entry(start)}
            found = {}
            for folder, folders, names in os.walk(start):
                folders[:] = [name for name in folders if Path(folder, name) != self.root / _PARTIAL]
                for path in (Path(folder, name) for name in names):
                    with suppress(FileNotFoundError):  # another process removed it since the folder was read
                        found[path.relative_to(self.root).as_posix()] = _entry(path)
            return dict(sorted(found.items()))

    def now_s(self) -> float:
        return time.time()

    def unfinished(self) -> dict[str, Entry]:
        found = {}
        with self._explained(_PARTIAL):
            for path in sorted((self.root / _PARTIAL).glob("*")):
                with suppress(FileNotFoundError):  # it was finished in between
                    found[path.name] = _entry(path)
        return found

    def discard(self, name: str) -> None:
        with self._explained(name):
            (self.root / _PARTIAL / Path(checked_key(name)).name).unlink(missing_ok=True)

    def size(self, key: str) -> int:
        with self._explained(key):
            path = self.path(key)
            if not path.is_file():  # a folder is no object
                raise FileNotFoundError
            return path.stat().st_size

    def delete(self, key: str) -> None:
        with self._explained(key):
            self.path(key).unlink(missing_ok=True)

    def delete_prefix(self, prefix: str) -> None:
        with self._explained(prefix):
            shutil.rmtree(self.path(prefix.strip("/")), onerror=_tolerate_others)

    def _put(self, key: str, stream: BinaryIO, place: Callable[[str, Path], None], *, settled: bool = True) -> None:
        """Write and (`settled`) sync a temporary file, then let `place` give it its name."""
        target = self.path(key)
        (self.root / _PARTIAL).mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=self.root / _PARTIAL)
        try:
            with os.fdopen(handle, "wb") as file:
                shutil.copyfileobj(stream, file, CHUNK_BYTES)
                file.flush()
                os.fchmod(file.fileno(), 0o644)  # mkstemp's 0600 would hide a shared store from its other users
                if settled:
                    os.fsync(file.fileno())
            for attempt in range(_ATTEMPTS):
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    place(partial, target)
                    if settled:
                        _sync(target.parent)
                    return
                except FileNotFoundError:  # another process removed the folder in between
                    if attempt == _ATTEMPTS - 1:
                        raise
        finally:
            Path(partial).unlink(missing_ok=True)

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(f"store {self.where}: no object {key}") from error
        except OSError as error:
            raise StoreError(f"store {self.where}: {key or 'root'}: {error.strerror}") from error


def _entry(path: Path) -> Entry:
    stat = path.stat()
    return Entry(bytes=stat.st_size, modified_s=stat.st_mtime, version=f"{stat.st_ino}-{stat.st_mtime_ns}")


def _tolerate_others(_function: Any, _path: str, failure: tuple[Any, BaseException, Any]) -> None:
    """Another process may remove or fill the same folder: the first does no harm, the second is its own to remove."""
    error = failure[1]
    if not (isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ENOTEMPTY, errno.ENOTDIR)):
        raise error


def _sync(path: Path) -> None:
    """Make a file's content, or the names in a folder, survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
