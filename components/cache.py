"""What is fetched or converted once on a machine and kept: folders that are there whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """REFLUX_CACHE, or ~/.cache/reflux."""
    return Path(os.environ.get("REFLUX_CACHE", Path.home() / ".cache" / "reflux"))


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder, which `make` writes in another place first, unless it is there."""
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        make(unfinished)
        unfinished.replace(folder)
    except OSError:
        if not folder.exists():  # else another process was faster: its folder is as good
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
