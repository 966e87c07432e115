"""Models of the Hugging Face hub: as its own library caches them, or with stand-ins for their weights."""

from __future__ import annotations

import shutil
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from reflux.components import weight_headers
from reflux.components.cache import made_once
from reflux.components.canonical import canonical, sha256_hex

FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
"""Never pickles."""


def fetch(name: str, revision: str | None, cache: Path, *, weights: bool) -> Path:
    """The folder of a model. Without `weights` it is made below `cache`, with stand-ins for them (weight_headers.py).

    A hub that does not answer is made up for by what is cached here. ValueError if neither has the model.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        known = None if weights else _listed(name, revision)
        if known is not None:
            return _without_weights(name, known, cache)
        return Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ValueError(
            f"source {name}: no such path here, and the Hugging Face hub does not give it ({error})"
        ) from error


def bytes_to_fetch(name: str, revision: str | None) -> int:
    """Of the files that `fetch` takes, weights included; 0 if the hub does not answer."""
    known = _listed(name, revision)
    return sum(_wanted(known).values()) if known is not None else 0


def _listed(name: str, revision: str | None) -> Any:
    """What the hub says of a model and of each of its files; None if it says nothing."""
    import huggingface_hub
    from httpx2 import TransportError
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        return huggingface_hub.HfApi().model_info(name, revision=revision, files_metadata=True)
    except (HfHubHTTPError, OfflineModeIsEnabled, TransportError):
        return None


def _wanted(known: Any) -> dict[str, int]:
    """Name -> bytes."""
    files = {each.rfilename: each.size or 0 for each in known.siblings or []}
    return {name: size for name, size in files.items() if any(fnmatchcase(name, pattern) for pattern in FILES)}


def _without_weights(name: str, known: Any, cache: Path) -> Path:
    import huggingface_hub

    stand_ins = {file: size for file, size in _wanted(known).items() if weight_headers.is_weights(file)}
    last = name.rpartition("/")[2]

    def make(folder: Path) -> None:
        rest = [pattern for pattern in FILES if not weight_headers.is_weights(pattern)]
        shutil.copytree(
            huggingface_hub.snapshot_download(name, revision=known.sha, allow_patterns=rest),
            folder / last,
            ignore=lambda _, files: [file for file in files if weight_headers.is_weights(file)],
        )
        for file, size in stand_ins.items():
            weight_headers.write(partial(_beginning, name, known.sha, file), size, folder / last / file)

    key = canonical(["hub", name, known.sha, sorted(stand_ins.items())])
    return made_once(cache / sha256_hex(key)[:32], make) / last


def _beginning(name: str, commit: str, file: str, count: int) -> bytes:
    """The first so many bytes of a file."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    headers = {**build_hf_headers(), "range": f"bytes=0-{count - 1}"}
    answer = get_session().get(hf_hub_url(name, file, revision=commit), headers=headers)
    hf_raise_for_status(answer)
    return bytes(answer.content[:count])
