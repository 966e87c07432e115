"""Schedules as they are kept in Git: what `reflux schedule apply` reads.

A file has a list `schedules`; a folder stands for its files *.yaml. Apply makes the cluster like the files: what is
unchanged is left alone, what changed is replaced without ending a run in flight, and with --prune what reflux made and
no file names any more goes.

    schedules:
      - name: weekly-distillation      # small letters, digits and -; also names the pipeline that it runs
        recipe: demo                   # compiled and uploaded by apply, so the schedule runs what is in Git
        changes: {distill: {max_steps: 40}}   # optional, as in a --config file
        cron: 0 0 3 * * 1              # second minute hour day-of-month month day-of-week
        time_zone: UTC                 # that of the cluster's scheduler, which has one for all schedules
        parameters:                    # inputs of the pipeline, in their types; `run` is best left out
          store: s3://reflux/artifacts
        enabled: true

      - name: nightly-check            # or a pipeline that is registered already: its newest version runs
        pipeline: reflux-distillation
        cron: 0 30 1 * * *
        time_zone: UTC
        parameters: {store: s3://reflux/artifacts}

Every field of a schedule, with its default, is a field of `Schedule` below.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from reflux.components import declare
from reflux.pipelines.kubeflow import cron, registration, schedule_found

_LONGEST_DESCRIPTION = 255  # that KFP's own form takes, the mark and the line before it included


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One schedule. Everything is checked here but `parameters`, which only the pipeline knows."""

    name: str
    """Small letters, digits and -. The pipeline of a `recipe` is called the same, so that no other upload is run."""

    cron: str
    """Six fields: second minute hour day-of-month month day-of-week."""

    time_zone: str
    """The zone in which the cluster reads `cron`. KFP has one for all schedules, CRON_SCHEDULE_TIMEZONE of its
    scheduler, UTC unless set; it cannot be set here, and is written down so that nobody has to guess."""

    recipe: str = ""
    """A named recipe to compile and upload, or "" with `pipeline`."""

    pipeline: str = ""
    """A pipeline that is registered already, or "" with `recipe`."""

    changes: dict[str, Any] = field(default_factory=dict)
    """Values laid over the recipe: sources by name, and one table per stage."""

    image: str = ""
    """Of every container; "" is reflux's own for the CPU."""

    parameters: dict[str, Any] = field(default_factory=dict)
    """Inputs of the pipeline. Those left out have the defaults of the version that runs."""

    experiment: str = "reflux"
    """In which KFP lists the runs; made if it is not there."""

    pipeline_root: str = ""
    """Where KFP keeps the run's artifacts; "" is the namespace's own."""

    service_account: str = ""
    """Under which the run's pods work; "" is KFP's default."""

    max_concurrency: int = 1
    """Runs at a time, 1 to 10. While so many are in flight, no other begins."""

    catch_up: bool = False
    """Whether each time that was missed, as during a pause, is run later. If not, the last of them alone is."""

    enabled: bool = True
    """Whether it starts runs."""

    description: str = ""
    """Shown in the UI."""

    def __post_init__(self) -> None:
        registration.check_name("name", self.name)
        if bool(self.recipe) == bool(self.pipeline):
            raise ValueError(f"{self.name}: give a recipe, or a pipeline that is registered already, and not both")
        if self.pipeline and (self.changes or self.image):
            raise ValueError(f"{self.name}: changes and image belong to recipe; a registered pipeline is what it is")
        room = _LONGEST_DESCRIPTION - 1 - len(self.mark("0" * 64))
        if len(self.description) > room or "\n" in self.description:
            raise ValueError(f"{self.name}: description: must be one line of up to {room} characters")
        if not 1 <= self.max_concurrency <= 10:
            raise ValueError(f"{self.name}: max_concurrency {self.max_concurrency} must be from 1 to 10")
        try:
            cron.parse(self.cron)
            cron.zone(self.time_zone)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    @property
    def source(self) -> str:
        """What it runs, for people."""
        return f"recipe {self.recipe}" if self.recipe else f"pipeline {self.pipeline}"

    def mark(self, digest: str) -> str:
        """What ends the description on the server. `digest` is that of everything that was asked for."""
        return schedule_found.mark(source=self.source, time_zone=self.time_zone, digest=digest)


_TYPES: dict[str, tuple[type, str]] = {
    "str": (str, "text"),
    "bool": (bool, "true or false"),
    "int": (int, "a whole number"),
    "dict[str, Any]": (dict, "a table"),
}


def read(paths: Iterable[Path]) -> list[Schedule]:
    """All schedules of these files and folders. ValueError names the file, the schedule and the field."""
    schedules: list[Schedule] = []
    for path in _files(paths):
        for number, entry in enumerate(_entries(path), start=1):
            try:
                schedules.append(_schedule(entry, number))
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
    names = [schedule.name for schedule in schedules]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"schedule {name}: is there {names.count(name)} times; a name stands for one")
    return schedules


def _files(paths: Iterable[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
        if not inside:
            raise ValueError(f"{path}: has no file *.yaml")
        found += inside
    return found


def _entries(path: Path) -> list[Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict) or set(content) != {"schedules"} or not isinstance(content["schedules"], list):
        raise ValueError(f"{path}: one list `schedules:` is expected, and nothing else")
    entries: list[Any] = content["schedules"]
    return entries


def _schedule(entry: Any, number: int) -> Schedule:
    if not isinstance(entry, dict):
        raise ValueError(f"schedule {number}: a table of fields is expected, not {entry!r}")
    known = {f.name: str(f.type) for f in fields(Schedule)}
    label = entry.get("name", f"schedule {number}")
    for name, value in entry.items():
        if name not in known:
            near = declare.nearest(str(name), known)
            raise ValueError(f"{label}: {name}: no such field; did you mean {near}? Known: {', '.join(known)}")
        kind, meaning = _TYPES[known[name]]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"{label}: {name}: {value!r} is not {meaning}")
    needed = [f.name for f in fields(Schedule) if f.default is MISSING and f.default_factory is MISSING]
    missing = [name for name in needed if name not in entry]
    if missing:
        raise ValueError(f"{label}: no value for {', '.join(missing)}")
    return Schedule(**entry)
