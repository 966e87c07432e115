"""What a stage's container gets from this machine: folders and files, at the paths they have here, and the environment.

A container sees nothing of the machine by itself. The store, sources that are paths, the cache of what was fetched and
files that a variable names are mounted; what cannot be is refused here, before a stage starts.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from reflux.components.provenance import public_uri
from reflux.pipelines.store.stores import StoreRef

_FAMILIES = ("AWS_", "REFLUX_", "MLFLOW_")
_SINGLE = (
    "OMP_NUM_THREADS", "HF_HUB_DISABLE_PROGRESS_BARS",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip
_OUR_OWN = ("REFLUX_CACHE", "REFLUX_CODE_VERSION", "REFLUX_PARENT_PID", "REFLUX_PROGRESS")
_FILES = (  # variables that name a file, and where the file is if they are not set
    ("AWS_CA_BUNDLE", ""),
    ("AWS_CONFIG_FILE", "~/.aws/config"),
    ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
    ("AWS_WEB_IDENTITY_TOKEN_FILE", ""),
    ("MLFLOW_TRACKING_CLIENT_CERT_PATH", ""),
    ("MLFLOW_TRACKING_SERVER_CERT_PATH", ""),
    ("REFLUX_STORE_CA_BUNDLE", ""),
)
_ELSEWHERE = ("s3", "minio", "builtin")  # schemes of sources that a container reaches by itself
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True)
class View:
    """What a container sees of this machine."""

    writable: dict[Path, bool] = field(default_factory=dict)
    """path -> whether the container may write there; the path is the same inside and outside."""
    environment: dict[str, str] = field(default_factory=dict)
    """Holds credentials: for the container, never for a log."""
    sources: dict[str, str] = field(default_factory=dict)
    """name -> URI, with absolute paths."""


def view(sources: Mapping[str, str], ref: StoreRef, environment: Mapping[str, str], *, network: str) -> View:
    """The view for a run with these sources and store, in this environment. ValueError names what it lacks."""
    seen = View()
    seen.environment.update({name: environment[name] for name in _passed(environment)})
    for name, usual in _FILES:
        _mount_file(seen, name, environment.get(name) or usual)
    cache = Path(environment.get("REFLUX_CACHE") or Path.home() / ".cache" / "reflux")
    _mount(seen, cache, writable=True)
    seen.environment["REFLUX_CACHE"] = str(cache.absolute())
    if ref.kind == "directory":
        _mount(seen, Path(ref.uri), writable=True)
    _require_server(environment.get("MLFLOW_TRACKING_URI", ""))
    for name, uri in sources.items():
        seen.sources[name] = _mount_source(seen, name, uri)
    if network != "host":
        _require_no_loopback(seen.environment, network)
    return seen


def _passed(environment: Mapping[str, str]) -> Iterator[str]:
    for name in environment:
        if name not in _OUR_OWN and (name.startswith(_FAMILIES) or name in _SINGLE):
            yield name


def _mount(seen: View, path: Path, *, writable: bool) -> None:
    path = path.absolute()
    if writable:
        path.mkdir(parents=True, exist_ok=True)
    seen.writable[path] = seen.writable.get(path, False) or writable


def _mount_file(seen: View, variable: str, text: str) -> None:
    path = Path(text).expanduser()
    if text and path.is_file():
        _mount(seen, path, writable=False)
        seen.environment[variable] = str(path.absolute())


def _require_server(tracking_uri: str) -> None:
    """An image has MLflow's client, which knows no database."""
    if tracking_uri and urlsplit(tracking_uri).scheme not in ("http", "https"):
        raise ValueError(
            f"MLFLOW_TRACKING_URI {public_uri(tracking_uri)}: containers track through a server; start `mlflow server` "
            "and set MLFLOW_TRACKING_URI=http://127.0.0.1:5000, or set it to nothing, which switches tracking off"
        )


def _mount_source(seen: View, name: str, uri: str) -> str:
    """The URI by which the container finds the source."""
    scheme, _, rest = uri.partition(":")
    if not uri or scheme in _ELSEWHERE:
        return uri
    if scheme == "package":
        _mount_package(seen, rest)
        return uri
    path = Path(unquote(urlsplit(uri).path) if scheme == "file" else uri).expanduser().absolute()
    if not path.exists():
        _mount_hub(seen)
        return uri
    _require_no_links(name, path)
    _mount(seen, path, writable=False)
    return str(path)


def _mount_package(seen: View, module: str) -> None:
    """The module's folder, at its place here: it is found through PYTHONPATH and never imported."""
    spec = importlib.util.find_spec(module)
    (folder,) = map(Path, spec.submodule_search_locations) if spec and spec.submodule_search_locations else (None,)
    if folder is None:
        raise ValueError(f"source package:{module}: no such package is installed here")
    _mount(seen, folder, writable=False)
    known = seen.environment.get("PYTHONPATH", "").split(os.pathsep)
    seen.environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, [*known, str(folder.parent)])))


def _mount_hub(seen: View) -> None:
    """A model of the hub was fetched before the run; containers read that copy, so that no stage gets another one."""
    from huggingface_hub.constants import HF_HUB_CACHE

    _mount(seen, Path(HF_HUB_CACHE), writable=False)
    seen.environment.update({"HF_HUB_CACHE": str(Path(HF_HUB_CACHE).absolute()), "HF_HUB_OFFLINE": "1"})


def _require_no_links(name: str, path: Path) -> None:
    for entry in path.rglob("*") if path.is_dir() else ():
        if entry.is_symlink() and not entry.resolve().is_relative_to(path.resolve()):
            raise ValueError(
                f"{name} {path}: {entry.name} is a link to outside, which no container sees; copy the file"
            )


def _require_no_loopback(environment: Mapping[str, str], network: str) -> None:
    for variable, value in environment.items():
        if variable.endswith(("_URL", "_URL_S3", "_URI")) and urlsplit(value).hostname in _LOOPBACK:
            raise ValueError(
                f"--network {network}: {variable} is {urlsplit(value).netloc}, which there is the container itself; "
                "use --network host, or an address that both can reach"
            )
