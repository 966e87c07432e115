"""The schedules of a cluster in a table: when each fires next, in words too, because cron is easily misread."""

from __future__ import annotations

from datetime import datetime
from itertools import islice
from typing import Any

from rich.console import Console
from rich.table import Table

from reflux.pipelines.kubeflow import cron, schedule_found
from reflux.pipelines.kubeflow.kfp_api import Api

NEXT_TIMES = 3
_WIDTH = 240  # a terminal folds what is too long for it; cut off it would be of no use, and a pipe has no width


def rows(api: Api) -> list[dict[str, Any]]:
    """One row for each schedule that reflux made, by name, the current one of a name first."""
    found = sorted(schedule_found.found(api), key=lambda each: each.name)  # stable: newest first within a name
    seen: set[str] = set()
    told = []
    for each in found:
        state = "replaced" if each.name in seen else "on" if each.enabled else "off"
        seen.add(each.name)
        told.append(_row(each, state))
    return told


def show(told: list[dict[str, Any]]) -> None:
    """Print them for people."""
    table = Table(box=None, pad_edge=False)
    for title in ("schedule", "state", "runs", "when", "next"):
        table.add_column(title, no_wrap=True)
    for row in told:
        table.add_row(row["name"], row["state"], row["runs"], f"{row['when']} {row['time_zone']}", *row["next"][:1])
    Console(width=_WIDTH).print(table if told else "no schedules of reflux here")


def _row(found: schedule_found.Found, state: str) -> dict[str, Any]:
    text = found.body.trigger.cron_schedule.cron
    times = cron.parse(text)
    return {
        "name": found.name,
        "state": state,
        "runs": found.source,
        "cron": text,
        "time_zone": found.time_zone,
        "when": cron.in_words(times),
        "next": _next(times, found.time_zone) if state == "on" else [],
        "parameters": (found.body.runtime_config.parameters or {}) if found.body.runtime_config else {},
        "id": found.id,
    }


def _next(times: cron.Cron, zone: str) -> list[str]:
    """The next times on that zone's clock; none where this machine's table does not have the zone."""
    try:
        now = datetime.now(cron.zone(zone)).replace(tzinfo=None)
    except ValueError:
        return []
    return [f"{each:%Y-%m-%d %H:%M:%S}" for each in islice(cron.coming(times, now), NEXT_TIMES)]
