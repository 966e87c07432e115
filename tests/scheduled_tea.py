"""Schedules of the toy pipeline on the contract test's server: what tests of schedules ask for and look at."""

from __future__ import annotations

from typing import Any

from servers.kfp_api_contract import Contract

from reflux.pipelines.kubeflow import kfp_api, schedule
from reflux.pipelines.kubeflow.kfp_api import Api
from reflux.pipelines.kubeflow.package import Package
from reflux.pipelines.kubeflow.schedule_file import Schedule

VALUES = {"store": "/s", "leaves": "assam", "run": "weekly"}


def reach(contract: Contract, *, dry_run: bool = False) -> Api:
    return kfp_api.connect(kfp_api.Connection(host=contract.url), dry_run=dry_run)


def wanted(package: Package | None = None, **changes: Any) -> schedule.Wanted:
    of = {"recipe": "tea"} if package else {"pipeline": "tea"}
    given = {"name": "weekly", "cron": "0 0 3 * * 1", "time_zone": "UTC", **of, **changes}
    return schedule.Wanted(schedule=Schedule(**given), package=package, values=VALUES)


def told(contract: Contract) -> list[str]:
    """What was changed on the server since the last time, without ids."""
    changes = [f"{verb} {path}" for verb, path, _ in contract.changes()]
    contract.asked.clear()
    for found in (*contract.state.recurring, *contract.state.pipelines):
        changes = [each.replace(found, "ID") for each in changes]
    return [each.replace("/apis/v2beta1/", "") for each in changes]


def states(contract: Contract) -> list[tuple[str, str]]:
    """(cron, status) of all schedules, the oldest first."""
    return [(each["trigger"]["cron_schedule"]["cron"], each["status"]) for each in contract.state.recurring.values()]
