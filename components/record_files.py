"""The files behind a path as streams of bytes: plain ones, gzip, and the members of a zip archive.

Exports come zipped, and an archive can unpack to a thousand times its size. So nothing is unpacked to disk or into
memory as a whole, and what an archive may unpack to is limited.
"""

from __future__ import annotations

import gzip
import lzma
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

MAX_UNPACKED_BYTES = 2**30
"""Of a gzip file or of all members of a zip archive."""
MAX_MEMBERS = 10_000
DAMAGE = (OSError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error)
"""What Python raises while a broken or unusually packed archive is read."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Bytes of one table: a file, or a member of an archive."""

    name: str
    """Base name; for a member ARCHIVE/MEMBER."""
    kind: str
    """Suffix in lower case that says how the unpacked bytes are read: .jsonl."""
    stream: BinaryIO
    limit_bytes: int
    """More than these are not read."""


def parts(path: Path, kinds: Collection[str]) -> Iterator[Part]:
    """Every part of a file, or of a folder's files in name order; a part's stream is open until the next is asked for.

    Names that begin with _ or . are markers left by other tools. ValueError names a file that is none of `kinds`,
    before any is read, and an archive that is not one or that unpacks to too much.
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and not _is_marker(file.name))
    else:
        files = [path]
    for file in files:
        _kind(file.name, kinds)
    for file in files:
        suffix = file.suffix.lower()
        if suffix == ".zip":
            yield from _members(file, kinds)
        elif suffix == ".gz":
            with gzip.open(file) as stream:
                yield Part(
                    name=file.name,
                    kind=_kind(file.name, kinds),
                    stream=cast(BinaryIO, stream),
                    limit_bytes=MAX_UNPACKED_BYTES,
                )
        else:
            with file.open("rb") as plain:
                yield Part(name=file.name, kind=suffix, stream=plain, limit_bytes=file.stat().st_size)


def _members(file: Path, kinds: Collection[str]) -> Iterator[Part]:
    try:
        archive = zipfile.ZipFile(file)
    except (*DAMAGE, ValueError) as error:
        raise ValueError(f"{file.name}: not a readable zip archive ({error})") from error
    with archive:
        members = [
            member
            for member in archive.infolist()
            if not member.filename.endswith("/") and not _is_marker(PurePosixPath(member.filename).name)
        ]
        unpacked = sum(member.file_size for member in members)  # zipfile reads no more of a member than it declares
        if unpacked > MAX_UNPACKED_BYTES or len(members) > MAX_MEMBERS:
            raise ValueError(
                f"{file.name}: unpacks to {len(members):,} files of {unpacked:,} bytes; at most {MAX_MEMBERS:,} and "
                f"{MAX_UNPACKED_BYTES:,} are read"
            )
        for member in members:
            name = f"{file.name}/{member.filename}"
            kind = _packed_kind(name, kinds)
            if member.flag_bits & 1:
                raise ValueError(f"{name}: is encrypted; unpack it")
            try:
                stream = archive.open(member)
            except DAMAGE as error:
                raise ValueError(f"{name}: cannot be read ({error})") from error
            with stream:
                yield Part(name=name, kind=kind, stream=cast(BinaryIO, stream), limit_bytes=member.file_size)


def _kind(name: str, kinds: Collection[str]) -> str:
    """The suffix that says how a file is read: .zip, or that of what a .gz holds."""
    suffix = PurePosixPath(name).suffix.lower()
    if suffix == ".zip":
        return suffix
    return _packed_kind(name[: -len(suffix)], kinds) if suffix == ".gz" else _plain_kind(name, kinds)


def _packed_kind(name: str, kinds: Collection[str]) -> str:
    kind = _plain_kind(name, kinds)
    if kind == ".parquet":
        raise ValueError(f"{name}: Parquet within an archive is not read, it is packed by itself; unpack it")
    return kind


def _plain_kind(name: str, kinds: Collection[str]) -> str:
    suffix = PurePosixPath(name).suffix.lower()
    if suffix not in kinds:
        raise ValueError(f"{name}: unknown kind of file; allowed are {', '.join(kinds)}, and .gz and .zip of text")
    return suffix


def _is_marker(name: str) -> bool:
    return name[:1] in ("_", ".")
