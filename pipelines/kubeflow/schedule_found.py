"""The schedules of a cluster that reflux made: those whose description ends with its mark.

The API has no labels for schedules. The mark holds the sha256 of what was asked for, so that a declaration can be
compared with what stands on the server without undoing what the server does to a body that it is given.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from reflux.pipelines.kubeflow import kfp_api, watch
from reflux.pipelines.kubeflow.kfp_api import Api

_MARKED = re.compile(
    r"\[reflux schedule of (?P<source>\w+ .+), times in (?P<zone>\S+), sha256:(?P<digest>[0-9a-f]{64})\]$"
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """A schedule on the server that reflux made. `body` is what the API says of it."""

    id: str
    name: str
    enabled: bool
    source: str
    time_zone: str
    digest: str
    body: Any


def mark(*, source: str, time_zone: str, digest: str) -> str:
    """The end of the description by which a schedule is known again."""
    return f"[reflux schedule of {source}, times in {time_zone}, sha256:{digest}]"


def found(api: Api, name: str = "") -> list[Found]:
    """The schedules that reflux made, the newest first; with `name`, those of that name. Of several of one name the
    newest is the schedule, the others are what it replaced: so that all commands agree, ids decide within a second.
    """
    filtered = {"filter": kfp_api.equals("display_name", name)} if name else {}
    method = api.client.recurring_runs.recurring_run_service_list_recurring_runs
    listed = kfp_api.every(
        api, method, "recurring_runs", sort_by="created_at desc", **filtered, **kfp_api.in_namespace(api)
    )
    ours = [each for each in map(_found, listed) if each is not None]
    return sorted(ours, key=lambda each: (each.body.created_at, each.id), reverse=True)


def named(api: Api, name: str) -> Found:
    """The current schedule of that name. ValueError if reflux made none."""
    there = found(api, name)
    if not there:
        known = ", ".join(sorted({each.name for each in found(api)})) or "none"
        raise ValueError(f"schedule {name!r}: reflux has made none of that name here; there are: {known}")
    return there[0]


def in_flight(api: Api, schedule: Found) -> list[str]:
    """The names of its runs that have not ended.

    They are looked for among the runs of its experiment. KFP 2.17 knows a filter by recurring_run_id, but, as its
    source reads, looks in the database for a column RecurringRunId, which is called JobUUID.
    """
    method = api.client.runs.run_service_list_runs
    experiment_id = schedule.body.experiment_id
    running = []
    for run in kfp_api.every(api, method, "runs", experiment_id=experiment_id, sort_by="created_at desc"):
        if run.created_at < schedule.body.created_at:
            break
        if run.recurring_run_id == schedule.id and run.state not in watch.ENDED:
            running.append(run.display_name)
    return running


def _found(body: Any) -> Found | None:
    marked = _MARKED.search(body.description or "")
    if marked is None:
        return None
    return Found(
        id=body.recurring_run_id,
        name=body.display_name,
        enabled=body.status == "ENABLED",
        source=marked["source"],
        time_zone=marked["zone"],
        digest=marked["digest"],
        body=body,
    )
