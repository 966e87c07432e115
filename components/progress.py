"""Progress lines and live metric points: how long work tells the outside where it stands.

A stage calls `report` as it goes and never knows who reads it. In a pod's log a line of text appears every few
seconds; under a parent that draws a bar (REFLUX_PROGRESS=json) the same report is one JSON line, which `parse` reads
back. Metric points go to listeners; tracking is one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PLAIN_INTERVAL_S = 5.0  # a pod's log is read by people, later
_JSON_INTERVAL_S = 0.2  # a bar is watched
_MARK = "reflux_progress"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """`done` of `total` units, and seconds left if the rate so far holds (None until a rate is known)."""

    done: int
    total: int
    unit: str
    note: str
    left_s: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MetricPoint:
    """Values of one step. `time_ms` (since the epoch) comes from the checkpoint, so a resumed stage repeats it."""

    step: int
    time_ms: int
    values: dict[str, float]


Listener = Callable[[list[MetricPoint]], None]


@dataclasses.dataclass
class _Series:
    """One run through `total` units: where it began (not at 0 after a resume) and when it was last told."""

    unit: str
    total: int
    first: int
    began: float
    last: int
    told: float


_series: _Series | None = None
_listeners: list[Listener] = []


def report(done: int, total: int, unit: str, note: str = "") -> None:
    """Say that `done` of `total` units are finished, at most once per interval; first and last are always said."""
    global _series
    now = time.monotonic()
    series = _series
    if series is None or (series.unit, series.total) != (unit, total) or done < series.last:
        series = _series = _Series(unit=unit, total=total, first=done, began=now, last=done, told=-1e9)
    series.last = done
    as_json = os.environ.get("REFLUX_PROGRESS") == "json"
    if done < total and now - series.told < (_JSON_INTERVAL_S if as_json else _PLAIN_INTERVAL_S):
        return
    series.told = now
    advanced = done - series.first
    left_s = (now - series.began) / advanced * (total - done) if advanced > 0 else None
    progress = Progress(done=done, total=total, unit=unit, note=note, left_s=left_s)
    print(_json_line(progress) if as_json else plain(progress), flush=True)
    if done >= total:
        _series = None


def plain(progress: Progress) -> str:
    """progress  25 %  8/32 batches, 1 min 40 s left (layer 3)"""
    percent = 100 * progress.done // progress.total if progress.total else 100
    left = "" if progress.left_s is None or progress.done >= progress.total else f", {duration(progress.left_s)} left"
    note = f" ({progress.note})" if progress.note else ""
    return f"progress {percent:3d} %  {progress.done}/{progress.total} {progress.unit}{left}{note}"


def duration(seconds: float) -> str:
    """75 -> 1 min 15 s"""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def parse(line: str) -> Progress | None:
    """The report in a line of a stage's output, or None for any other line."""
    if not line.startswith(f'{{"{_MARK}"'):
        return None
    try:
        return Progress(**json.loads(line)[_MARK])
    except (ValueError, TypeError):  # a stage's own print that happens to begin alike
        return None


def publish(points: list[MetricPoint]) -> None:
    """Hand points to every listener. Publish only what the checkpoint holds; after a resume, publish that again."""
    for listener in _listeners:
        listener(points)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Within the block, `listener` receives every published list of points."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def _json_line(progress: Progress) -> str:
    return json.dumps({_MARK: dataclasses.asdict(progress)})
