"""What the work ran on and with: recorded in every manifest, never part of a digest."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

COMPILED_BY = "REFLUX_COMPILED_BY"
"""The variable of every container that says which version of reflux made the pipeline."""
_RECORDED = ("torch", "transformers", "pyarrow")


def versions() -> dict[str, str]:
    """Of reflux (and its commit in a source tree), of Python and of the libraries that compute, none imported."""
    found = {"python": platform.python_version(), "reflux": _version("reflux"), "commit": commit()}
    return found | {name: version for name in _RECORDED if (version := _version(name))}


def version() -> str:
    """Of reflux."""
    return _version("reflux")


def require_compiled_version() -> None:
    """ValueError in an image of another version than compiled the pipeline: its stages may know other fields, or mean
    something else by them. Each container asks for itself, for a tag can be another image on every node.
    """
    compiled_by = os.environ.get(COMPILED_BY) or version()
    if compiled_by != version():
        raise ValueError(
            f"image: holds reflux {version()}, and the pipeline was compiled by {compiled_by}; compile it with --image "
            f"of that version, or with reflux {version()}"
        )


def machine() -> dict[str, str]:
    return {"system": platform.system(), "machine": platform.machine()}


def now() -> str:
    """UTC, ISO 8601, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@functools.cache
def commit() -> str:
    """The git commit of this source tree, with +changed when files differ from it.

    An installed package has none; its image says in REFLUX_CODE_VERSION from which it was made, otherwise it is empty.
    """
    # an installed package may lie in somebody else's repository: only a tracked file has a commit
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None or (head := _git("rev-parse", "HEAD")) is None:
        return os.environ.get("REFLUX_CODE_VERSION", "")
    return head + ("+changed" if _git("diff", "--quiet", "HEAD", "--", ".", "../kernels") is None else "")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
