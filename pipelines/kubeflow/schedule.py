"""Schedules on a cluster, made to be like their declarations: created, left alone, replaced, paused, deleted.

The API cannot change a schedule, only make, switch and delete one, and deleting one can end the runs that it started,
which Kubernetes counts as its parts. So a changed schedule is replaced in this order: the new one is made switched
off, the old one is switched off, the new one on, and the old one is deleted once none of its runs is in flight, if need
be by a later apply. No schedule without reflux's mark is ever touched.

The API does not keep two commands from making two schedules of one name either. Of several the newest is the schedule,
whoever made it, and every apply looks again after its last change: whatever came between, the last one to look leaves
one that is on.

A schedule names its pipeline and no version. KFP then looks up the newest version for each run; with a version it keeps
the workflow as it was compiled on the day of the schedule, old images of KFP's own included, or, where the server has a
plugin such as MLflow's, may forget the parameters.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click
import kfp_server_api
import yaml
from kfp_server_api import (
    RecurringRunMode,
    V2beta1CronSchedule,
    V2beta1PipelineVersionReference,
    V2beta1RecurringRun,
    V2beta1RuntimeConfig,
    V2beta1Trigger,
)

from reflux.pipelines import recipes
from reflux.pipelines.kubeflow import arguments, cron, kfp_api, package, registration
from reflux.pipelines.kubeflow.kfp_api import Api
from reflux.pipelines.kubeflow.package import Package
from reflux.pipelines.kubeflow.schedule_file import Schedule
from reflux.pipelines.kubeflow.schedule_found import Found, found, in_flight
from reflux.pipelines.recipes import Recipe

_GONE = 404


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A declaration whose pipeline is known. `package` is None where the pipeline is registered already."""

    schedule: Schedule
    package: Package | None
    values: dict[str, Any]


def wanted(api: Api, schedule: Schedule, texts: Iterable[str] = ()) -> Wanted:
    """Compile, or look the pipeline up, and check the parameters; `texts` are more of them, as NAME=VALUE. ValueError
    for what is wrong with them, and for a recipe whose pipeline is somebody else's.
    """
    made: Package | None = None
    recipe: Recipe | None = None
    try:
        if schedule.recipe:
            recipe = recipes.overridden(recipes.named(schedule.recipe), schedule.changes)
            registration.find_own(api, schedule.name, scheduled=True)
            made = package.of_recipe(schedule.recipe, recipe, image=schedule.image)
            inputs = made.parameters
        else:
            inputs = _inputs(api, schedule.pipeline)
        values = arguments.check(inputs, {**schedule.parameters, **arguments.parse(inputs, texts)})
        if recipe is not None:
            arguments.check_overrides(recipe, values)
    except ValueError as error:
        raise ValueError(f"{schedule.name}: {error}") from error
    return Wanted(schedule=schedule, package=made, values=values)


def apply(api: Api, asked: Wanted) -> None:
    """Make the cluster's schedule of that name like the declaration."""
    schedule = asked.schedule
    body, digest = _body(api, asked)
    there = found(api, schedule.name)
    if there and there[0].digest == digest:
        if [each.enabled for each in there] == [schedule.enabled]:
            click.echo(f"schedule {schedule.name}: unchanged")
    else:
        if there:
            _show_difference(there[0], body)
        click.echo(f"schedule {schedule.name}: {_when(schedule)}")
        there = [_created(api, schedule, body, digest, enabled=schedule.enabled and not there), *there]
    _settle(api, schedule, digest, there)


def _created(api: Api, schedule: Schedule, body: Any, digest: str, *, enabled: bool) -> Found:
    body.mode = RecurringRunMode.ENABLE if enabled else RecurringRunMode.DISABLE
    made = kfp_api.change(
        api,
        f"create schedule {schedule.name}",
        api.client.recurring_runs.recurring_run_service_create_recurring_run,
        recurring_run=body,
    )
    return Found(
        id=made.recurring_run_id if made else f"<schedule {schedule.name}>",
        name=schedule.name, enabled=enabled, source=schedule.source, time_zone=schedule.time_zone, digest=digest,
        body=made or body,
    )  # fmt: skip


def _settle(api: Api, schedule: Schedule, digest: str, there: list[Found]) -> None:
    """Of the schedules of that name leave the newest on, if it is to be, and no other. It looks until nothing is left
    to do, since another command may be at it too; a dry run takes `there` for what it would see.
    """
    while True:
        newest, *older = there if api.dry_run else _still_there(api, schedule.name)
        on = [each for each in older if each.enabled]
        for each in on:
            switch(api, each, on=False)
        own = newest.digest == digest
        wrong = own and newest.enabled != schedule.enabled
        if wrong:
            switch(api, newest, on=schedule.enabled)
        if api.dry_run or not (on or wrong):
            break
    if not own:
        click.echo(f"schedule {schedule.name}: another command changed it in this moment; now it is as that one says")
    for each in older:
        _delete_when_idle(api, each)


def _still_there(api: Api, name: str) -> list[Found]:
    there = found(api, name)
    if not there:
        raise ValueError(f"schedule {name}: another command deleted it in this moment; apply again")
    return there


def prune(api: Api, names: Collection[str]) -> None:
    """Delete every schedule that reflux made and that is not one of `names`."""
    for each in found(api):
        if each.name not in names:
            retire(api, each)


def retire(api: Api, old: Found) -> None:
    """Switch a schedule off, and delete it unless a run of it is in flight."""
    if old.enabled:
        switch(api, old, on=False)
    _delete_when_idle(api, old)


def delete(api: Api, old: Found) -> None:
    """Delete a schedule. ValueError if a run of it is in flight; then it is switched off only."""
    if old.enabled:
        switch(api, old, on=False)
    running = in_flight(api, old)
    if running:
        raise ValueError(
            f"schedule {old.name}: switched off, but not deleted, because that could end its run {running[0]}; "
            f"delete it again when that has ended"
        )
    _delete(api, old)


def switch(api: Api, schedule: Found, *, on: bool) -> None:
    """Let it start runs, or not. A run in flight goes on either way."""
    service = api.client.recurring_runs
    method = (
        service.recurring_run_service_enable_recurring_run
        if on
        else service.recurring_run_service_disable_recurring_run
    )
    what = f"switch {'on' if on else 'off'} schedule {schedule.name}"
    with _unless_gone():
        kfp_api.change(api, what, method, recurring_run_id=schedule.id)


def _body(api: Api, asked: Wanted) -> tuple[Any, str]:
    """What is sent to make it, and the sha256 over all of it but whether it is on: the identity of a schedule."""
    schedule = asked.schedule
    if asked.package is not None:
        standing = registration.prepare(
            api, pipeline=schedule.name, package=asked.package, experiment=schedule.experiment, latest=True,
            scheduled=True,
        )  # fmt: skip
        pipeline_id, experiment_id = standing.pipeline_id, standing.experiment_id
    else:
        pipeline_id = registration.find_pipeline(api, schedule.pipeline)
        experiment_id = registration.find_experiment(api, schedule.experiment)
        experiment_id = experiment_id or registration.create_experiment(api, schedule.experiment)
    body = V2beta1RecurringRun(
        display_name=schedule.name,
        experiment_id=experiment_id,
        pipeline_version_reference=V2beta1PipelineVersionReference(pipeline_id=pipeline_id),
        runtime_config=V2beta1RuntimeConfig(parameters=asked.values, pipeline_root=schedule.pipeline_root or None),
        service_account=schedule.service_account or None,
        trigger=V2beta1Trigger(cron_schedule=V2beta1CronSchedule(cron=schedule.cron)),
        max_concurrency=str(schedule.max_concurrency),
        no_catchup=not schedule.catch_up,
    )
    identity = {"body": _plain(body), "description": schedule.description, "time_zone": schedule.time_zone}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    body.description = f"{schedule.description}\n{schedule.mark(digest)}".strip()
    return body, digest


def _when(schedule: Schedule) -> str:
    """The time in words, and what of it only the cluster's own settings can make true."""
    words = f"{cron.in_words(cron.parse(schedule.cron))}, {schedule.time_zone}"
    if schedule.time_zone == cron.DEFAULT_ZONE:
        return words
    return f"{words}, if CRON_SCHEDULE_TIMEZONE of the cluster's scheduler is that; its default is {cron.DEFAULT_ZONE}"


def _inputs(api: Api, pipeline: str) -> dict[str, dict[str, Any]]:
    pipeline_id = registration.find_pipeline(api, pipeline)
    version = registration.newest_version(api, pipeline_id) if pipeline_id else None
    if version is None:
        raise ValueError(f"pipeline {pipeline!r}: {'has no version' if pipeline_id else 'is not registered'} here")
    return package.parameters(package.unwrapped(version.pipeline_spec))


def _delete_when_idle(api: Api, old: Found) -> None:
    running = in_flight(api, old)
    if running:
        click.echo(
            f"schedule {old.name}: the one before is off and stays until {running[0]} has ended; apply again then"
        )
    else:
        _delete(api, old)


def _delete(api: Api, old: Found) -> None:
    with _unless_gone():
        kfp_api.change(
            api,
            f"delete schedule {old.name}",
            api.client.recurring_runs.recurring_run_service_delete_recurring_run,
            recurring_run_id=old.id,
            propagation_policy="ORPHAN",  # a run that began this moment goes on; servers before 2.17 know no such word
        )


@contextmanager
def _unless_gone() -> Iterator[None]:
    """What another command deleted in this moment needs no change any more."""
    try:
        yield
    except kfp_api.RefusedError as error:
        if error.status != _GONE:
            raise


def _show_difference(old: Found, new: Any) -> None:
    """What the replacement changes, field by field."""
    before, after = (yaml.safe_dump(_compared(body), sort_keys=True).splitlines() for body in (old.body, new))
    for line in difflib.unified_diff(
        before, after, f"{old.name} on the cluster", f"{old.name} as declared", lineterm=""
    ):
        click.echo(line)


def _compared(body: Any) -> dict[str, Any]:
    told = _plain(body)
    keys = (
        "description",
        "experiment_id",
        "pipeline_version_reference",
        "runtime_config",
        "service_account",
        "trigger",
    )
    return {key: told[key] for key in (*keys, "max_concurrency", "no_catchup") if told.get(key) not in (None, "", {})}


def _plain(body: Any) -> dict[str, Any]:
    told: dict[str, Any] = kfp_server_api.ApiClient().sanitize_for_serialization(body)
    return told
