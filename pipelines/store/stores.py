"""Which store a command talks to: what `--store` means, how a run remembers it, and how to open it again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reflux.pipelines.store import embedded_store

if TYPE_CHECKING:
    from reflux.components.storage import Store

BESIDE = "store.json"
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")  # the first that is set wins
OWN_ENDPOINT = "REFLUX_STORE_ENDPOINT_URL"  # of the store alone; sources keep the others
KINDS = ("embedded", "directory", "s3")


@dataclass(frozen=True, kw_only=True)
class StoreRef:
    """A store as run.json and bundle/store.json record it: enough to find it again, and never a secret."""

    kind: str
    """embedded, directory or s3"""
    uri: str
    """The store's root, as the stages get it."""
    endpoint: str = ""
    """Of an S3 server other than AWS; the embedded one has another at every start."""
    folder: str = ""
    """Of an embedded store: where its data lie."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"store kind {self.kind!r}: allowed are {', '.join(KINDS)}")

    def described(self) -> str:
        place = {
            "embedded": f" in {self.folder}",
            "s3": f" at {self.endpoint}" if self.endpoint else "",
            "directory": "",
        }
        return f"{self.uri}{place[self.kind]}"

    def to_json(self) -> dict[str, str]:
        return {name: value for name, value in asdict(self).items() if value}


def choose(text: str, endpoint: str, data_dir: Path) -> tuple[StoreRef, str]:
    """The store that `--store TEXT --endpoint URL` names, and a remark for the person ("" if there is nothing to say).

    ValueError for a scheme that is not known, and where SeaweedFS could be installed but is not.
    """
    if not text:
        raise ValueError("--store: is empty; allowed are `embedded`, a directory, or s3://bucket/prefix")
    if text == "embedded":
        if endpoint:
            raise ValueError("--endpoint belongs to --store s3://…; the embedded store chooses its own")
        return _embedded(data_dir)
    if text.startswith(("s3://", "minio://")):
        if not text.partition("://")[2].strip("/"):
            raise ValueError(f"--store {text}: no bucket; write s3://bucket/prefix")
        known = (endpoint, *(os.environ.get(name, "") for name in (OWN_ENDPOINT, *ENDPOINT_VARIABLES)))
        return StoreRef(kind="s3", uri=text.rstrip("/"), endpoint=next(filter(None, known), "")), ""
    if endpoint:
        raise ValueError(f"--endpoint belongs to --store s3://…, not to {text!r}")
    scheme, separator, path = text.partition("://")
    if separator and scheme != "file":
        raise ValueError(f"--store {text}: allowed are `embedded`, a directory, or s3://bucket/prefix")
    return StoreRef(kind="directory", uri=str(Path(path if separator else text).absolute())), ""


def given(text: str, endpoint: str, data_dir: Path) -> StoreRef | None:
    """The store to use in place of a recorded one; None where no --store was given. ValueError as in `choose`."""
    if endpoint and not text:
        raise ValueError("--endpoint belongs to --store s3://…, which is not given")
    return choose(text, endpoint, data_dir)[0] if text else None


def _embedded(data_dir: Path) -> tuple[StoreRef, str]:
    if embedded_store.binary() is not None:
        return StoreRef(
            kind="embedded", uri=f"s3://{embedded_store.BUCKET}", folder=str(data_dir.absolute() / "store")
        ), ""
    if embedded_store.can_be_installed():
        raise ValueError(f"{embedded_store.why_no_binary()}; or choose a plain directory with --store DIR")
    directory = str(data_dir.absolute() / "directory-store")
    return StoreRef(
        kind="directory", uri=directory
    ), f"{embedded_store.why_no_binary()}: using the directory {directory}"


def from_json(recorded: dict[str, Any]) -> StoreRef:
    """What `to_json` wrote."""
    try:
        return StoreRef(**recorded)
    except TypeError as error:
        raise ValueError(f"the record of the store cannot be read: {error}") from None


def read_beside(bundle: Path) -> StoreRef:
    """The store that a bundle's store.json names. ValueError if it has none."""
    path = bundle / BESIDE
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ValueError(f"{bundle}: {BESIDE} is missing, so its store is unknown; name it with --store") from None
    except ValueError as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None


@contextmanager
def opened(ref: StoreRef, *, create: bool = False) -> Iterator[tuple[Store, dict[str, str]]]:
    """The store, and the environment in which a process reaches it. Unless `create`, a local one must exist already."""
    from reflux.components.storage import S3Settings, Store

    if not create and ref.kind != "s3" and not Path(ref.folder or ref.uri).is_dir():
        raise ValueError(f"the store {ref.described()} does not exist (any more); name the right one with --store")
    if ref.kind == "embedded":
        with embedded_store.running(Path(ref.folder)) as server:
            yield Store.open(ref.uri, S3Settings.of_store(server.environment())), server.environment()
    elif os.environ.get(OWN_ENDPOINT) and os.environ[OWN_ENDPOINT] == ref.endpoint:
        yield Store.open(ref.uri, S3Settings.of_store()), {}
    else:
        environment = dict.fromkeys(ENDPOINT_VARIABLES, ref.endpoint) if ref.endpoint else {}
        if OWN_ENDPOINT in os.environ:
            environment[OWN_ENDPOINT] = ""  # it names another store than the one that was asked for
        yield Store.open(ref.uri, S3Settings.from_env({**os.environ, **environment})), environment
