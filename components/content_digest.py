"""By what a file or a folder is known, wherever it lies: the digest of its content."""

from __future__ import annotations

import hashlib
from pathlib import Path

from reflux.components.canonical import canonical, sha256_hex


def digest(path: Path) -> str:
    """sha256 of a file's bytes, or of a folder: over the sorted (relative path, sha256) of its files."""
    if path.is_file():
        return f"sha256:{file_sha256(path)}"
    files = sorted(_files(path), key=lambda file: file.relative_to(path).as_posix())
    if not files:
        raise ValueError(f"source {path}: the folder holds no file")
    return "sha256:" + sha256_hex(canonical([[file.relative_to(path).as_posix(), file_sha256(file)] for file in files]))


def _files(folder: Path) -> list[Path]:
    files = []
    for entry in folder.rglob("*"):
        if entry.is_dir() and entry.is_symlink():  # it is not walked, so its content would be missing from the digest
            raise ValueError(f"source {entry}: a link to a folder cannot be digested; put the folder itself there")
        if entry.is_file():
            files.append(entry)
    return files


def file_sha256(path: Path) -> str:
    """In hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
