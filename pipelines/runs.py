"""The folders of runs under ./reflux-data/runs: what run.json records, and which folder a command continues.

A run that is being worked on is locked with flock(2), which the kernel drops however the command ends. So an unfinished
run without a lock was interrupted, and the same command takes it up again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from reflux.pipelines import recipes
from reflux.pipelines.store import stores

RECORD = "run.json"
LOCK = "lock"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What run.json holds: enough to read the run's results and verify its lineage without being told anything else."""

    run: str
    recipe: str
    store: stores.StoreRef
    configs: dict[str, dict[str, Any]]
    """stage -> field -> value, sources included."""
    config_digest: str
    """`config_digest` of recipe, configs and store: commands with one digest ask for the same run."""
    status: str = "running"
    """running (or interrupted), failed, finished"""
    artifacts: dict[str, dict[str, str]] = field(default_factory=dict)
    """stage -> {"key", "digest"} of every stage that is done."""
    root: str = ""
    """Digest of evaluate's artifact."""
    verdict: str = ""
    """pass or fail, of evaluate's gate."""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "store": self.store.to_json()}


def config_digest(recipe: str, configs: dict[str, dict[str, Any]], store: stores.StoreRef) -> str:
    """sha256 over the recipe's name, every value of every stage, and the store."""
    text = json.dumps([recipe, configs, store.to_json()], sort_keys=True)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def write(folder: Path, record: RunRecord) -> None:
    """run.json, whole or not at all."""
    partial = folder / f".{RECORD}.partial"
    partial.write_text(json.dumps(record.to_json(), indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / RECORD)


def read(folder: Path) -> RunRecord:
    """The record of a run's folder. ValueError if there is none or it cannot be read."""
    path = folder / RECORD
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return RunRecord(**{**content, "store": stores.from_json(content["store"])})
    except FileNotFoundError:
        raise ValueError(f"{folder}: not a run ({RECORD} is missing)") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None


def read_finished(folder: Path, wanted: str) -> RunRecord:
    """The record of a finished run. ValueError if it is unfinished, so that there is no `wanted`, or incomplete."""
    record = read(folder)
    if record.status != "finished":
        hint = "; the command that began it goes on" if record.status == "running" else ""
        raise ValueError(f"run {record.run} is {record.status}, not finished: it has no {wanted}{hint}")
    missing = [stage for stage in recipes.STAGES if "key" not in record.artifacts.get(stage, {})]
    if missing:
        raise ValueError(f"{folder / RECORD}: cannot be read (it names no artifact of {', '.join(missing)})")
    return record


def find(text: str, data_dir: Path) -> Path:
    """The folder of a run, given as its path or its name. ValueError lists the newest there are."""
    for folder in (Path(text), data_dir / "runs" / text):
        if (folder / RECORD).is_file():
            return folder
    known = ", ".join(folder.name for folder in _newest_first(data_dir)[:5]) or "none yet"
    raise ValueError(f"run {text!r}: no such folder, and no run of that name in {data_dir / 'runs'} (newest: {known})")


def check_name(name: str) -> None:
    """ValueError unless `name` can be a run's: it becomes a folder. "" lets the run be named for it."""
    if name and not _NAME.fullmatch(name):
        raise ValueError(f"--name {name!r}: letters, digits, '.', '_' and '-' are allowed, at most 100")


def require_writable(data_dir: Path) -> None:
    """Make the folder where runs live. ValueError, naming the option, if nothing can be written there."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=data_dir):
            pass
    except OSError as error:
        raise ValueError(f"--data-dir {data_dir}: cannot be written ({error.strerror})") from None


@contextmanager
def claimed(data_dir: Path, recipe: str, config_digest: str, name: str = "") -> Iterator[Path]:
    """The folder to work in, locked during the block: the unfinished run of this configuration, or a new one.

    ValueError if `name` is being worked on, or belongs to another configuration.
    """
    if name:
        folder = data_dir / "runs" / name
        if (folder / RECORD).exists() and read(folder).config_digest != config_digest:
            raise ValueError(
                f"--name {name}: a run of that name exists with another configuration; choose another name"
            )
        candidates = [folder]
    else:
        now = data_dir / "runs" / f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
        fresh = [
            folder for folder in (now, *(Path(f"{now}-{n}") for n in range(2, 100))) if not (folder / RECORD).exists()
        ]
        candidates = [*_unfinished(data_dir, config_digest), *fresh]
    for folder in candidates:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LOCK).open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield folder
            return
    raise ValueError(f"run {candidates[0].name}: another command is working on it")


def all_records(data_dir: Path) -> list[RunRecord]:
    """Of every run that can be read, the newest first: a damaged record hinders nobody."""
    return [record for _, record in _readable(data_dir)]


def _unfinished(data_dir: Path, config_digest: str) -> list[Path]:
    return [
        folder
        for folder, record in _readable(data_dir)
        if record.config_digest == config_digest and record.status != "finished"
    ]


def _readable(data_dir: Path) -> list[tuple[Path, RunRecord]]:
    found = []
    for folder in _newest_first(data_dir):
        with suppress(ValueError):
            found.append((folder, read(folder)))
    return found


def _newest_first(data_dir: Path) -> list[Path]:
    folders = [path.parent for path in (data_dir / "runs").glob(f"*/{RECORD}")]
    return sorted(folders, key=lambda folder: (folder / RECORD).stat().st_mtime_ns, reverse=True)
