"""Prompts, labels and models as sources: fetched to a local path and known by the digest of their content.

A changed file behind the same path or tag is another source: the digest, not the URI, decides what is made again.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from reflux.components import hub_models, weight_headers
from reflux.components.cache import cache_folder, made_once
from reflux.components.canonical import canonical, sha256_hex
from reflux.components.content_digest import digest
from reflux.components.provenance import public_uri
from reflux.components.storage import Entry, S3Settings

if TYPE_CHECKING:
    from reflux.components.stores.s3_store import S3Store

BUILTIN = Path(__file__).parent / "builtin"
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
_DATA_SUFFIXES = {".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".txt", ".gguf", ".gz", ".zip"}


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a source field of a configuration led to."""

    field: str
    uri: str
    path: Path
    digest: str  # sha256:… of the file, or of the folder's sorted files


def resolve(field: str, uri: str, settings: S3Settings | None = None, cache: Path | None = None) -> Source:
    """Fetch and digest. ValueError names the field, the URI and what is allowed."""
    try:
        path = fetch(uri, settings, cache)
        return Source(field=field, uri=public_uri(uri), path=path, digest=digest(path))
    except (ValueError, OSError) as error:
        raise ValueError(f"{field}: {error}") from error


def fetch(uri: str, settings: S3Settings | None = None, cache: Path | None = None, *, weights: bool = True) -> Path:
    """The local file or folder behind a URI.

    A path or file://…; s3://… or minio://…, an object, or a prefix as a folder, downloaded once per version into
    `cache` (default: REFLUX_CACHE or ~/.cache/reflux); builtin:NAME, a file that ships with reflux; package:MODULE, the
    one GGUF file inside an installed package, which is not imported; ORG/NAME[@REVISION], a model of the hub.

    Without `weights`, those of S3 and of the hub stay there, and stand-ins are in their place (weight_headers.py).
    """
    scheme, _, rest = uri.partition(":")
    if scheme in ("s3", "minio"):
        return _fetch_s3(uri, settings or S3Settings.from_env(), cache or cache_folder() / "sources", weights)
    if scheme == "builtin":
        return _fetch_builtin(rest)
    if scheme == "package":
        return _fetch_package(rest)
    path = Path(unquote(urlsplit(uri).path) if scheme == "file" else uri).expanduser()
    if uri and path.exists():
        return path.absolute()  # links are kept: a cache of models hides the extension behind them
    if "://" in uri and scheme != "file":
        allowed = "a path, file://, s3://, builtin:NAME, package:MODULE or ORG/NAME of the Hugging Face hub"
        raise ValueError(f"source {public_uri(uri)}: allowed is {allowed}")
    if hub := _hub_id(uri):
        return hub_models.fetch(*hub, cache or cache_folder() / "sources", weights=weights)
    raise ValueError(f"source {uri!r}: no such file or folder")


def bytes_to_fetch(uri: str, settings: S3Settings) -> int:
    """What `fetch` would download of a source in S3 or of a model of the hub, if nothing of it is here; 0 of others."""
    if uri.partition(":")[0] in ("s3", "minio"):
        _, _, chosen = _listed(uri, settings)
        return sum(entry.bytes for entry in chosen.values())
    hub = _hub_id(uri)
    return hub_models.bytes_to_fetch(*hub) if hub else 0


def _hub_id(uri: str) -> tuple[str, str | None] | None:
    """Name and revision of a model of the hub; None for what lies here, and for a mistyped path."""
    hub, path = _HUB_ID.fullmatch(uri), Path(uri).expanduser()
    return (hub[1], hub[2]) if hub and not path.exists() and path.suffix not in _DATA_SUFFIXES else None


def _listed(uri: str, settings: S3Settings) -> tuple[S3Store, str, dict[str, Entry]]:
    """The store, the key, and the objects that the source consists of, with what the store says of each."""
    from reflux.components.stores.s3_store import S3Store

    parts = urlsplit(uri)
    bucket, key = parts.netloc.rpartition("@")[2], parts.path.strip("/")
    store = S3Store(bucket, "", settings)
    entries = store.entries(key)
    chosen = {key: entries[key]} if key in entries else entries
    chosen = {name: entry for name, entry in chosen.items() if not name.endswith("/")}  # folder markers of S3 browsers
    if not chosen:
        raise ValueError(f"source {public_uri(uri)}: no object of that name and none below it")
    return store, key, chosen


def _fetch_s3(uri: str, settings: S3Settings, cache: Path, weights: bool) -> Path:
    store, key, chosen = _listed(uri, settings)
    bucket = store.bucket
    # the listing names the version, so that a changed object is fetched again and an unchanged one is not
    version = [[name, entry.version, entry.bytes] for name, entry in sorted(chosen.items())]
    kind = [] if weights else ["without weights"]
    folder = cache / sha256_hex(canonical([settings.endpoint, bucket, version, *kind]))[:32]
    name = key.rpartition("/")[2] or bucket

    def fill(made: Path) -> None:
        for object_key in chosen:
            relative = object_key.removeprefix(key).strip("/")
            path = made / name / relative if relative else made / name
            if weights or not weight_headers.is_weights(path.name):
                store.download(object_key, path)
            else:
                weight_headers.write(partial(store.read_range, object_key, 0), store.size(object_key), path)

    return made_once(folder, fill) / name


def _fetch_builtin(name: str) -> Path:
    known = (
        sorted(path.name for path in BUILTIN.iterdir() if not path.name.startswith(("_", ".")))
        if BUILTIN.is_dir()
        else []
    )
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        raise ValueError(
            f"source builtin:{name}: unknown{f'; did you mean {near[0]!r}?' if near else '.'} There are {known}"
        )
    return BUILTIN / name


def _fetch_package(module: str) -> Path:
    spec = (
        importlib.util.find_spec(module) if re.fullmatch(r"[A-Za-z_]\w*", module) else None
    )  # a dotted name would import its parent
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"source package:{module}: no such package is installed")
    found = sorted(file for folder in spec.submodule_search_locations for file in Path(folder).rglob("*.gguf"))
    if len(found) != 1:
        raise ValueError(
            f"source package:{module}: exactly one GGUF file is expected in it, found {[file.name for file in found]}"
        )
    return found[0].absolute()
