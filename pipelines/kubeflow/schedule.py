"""Schedules on a cluster, made to be like their declarations: created, left alone, replaced, paused, deleted.

The API cannot change a schedule, only make, switch and delete one, and deleting one can end the runs that it started,
which Kubernetes counts as its parts. So a changed schedule is replaced in this order: the new one is made switched
off, the old one is switched off, the new one on, and the old one is deleted once none of its runs is in flight, if need
be by a later apply. No schedule without reflux's mark is ever touched.

A schedule names its pipeline and no version. KFP then looks up the newest version for each run; with a version it keeps
the workflow as it was compiled on the day of the schedule, old images of KFP's own included, or, where the server has a
plugin such as MLflow's, may forget the parameters.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Collection, Iterable
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


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A declaration whose pipeline is known. `package` is None where the pipeline is registered already."""

    schedule: Schedule
    package: Package | None
    values: dict[str, Any]


def wanted(api: Api, schedule: Schedule, texts: Iterable[str] = ()) -> Wanted:
    """Compile, or look the pipeline up, and check the parameters; `texts` are more of them, as NAME=VALUE."""
    made: Package | None = None
    recipe: Recipe | None = None
    try:
        if schedule.recipe:
            recipe = recipes.overridden(recipes.named(schedule.recipe), schedule.changes)
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
    same = next((each for each in there if each.digest == digest), None)
    replaced = [each for each in there if each is not same]
    if same is not None:
        if same.enabled == schedule.enabled:
            click.echo(f"schedule {schedule.name}: unchanged")
        for each in replaced:
            retire(api, each)
        if same.enabled != schedule.enabled:
            switch(api, same, on=schedule.enabled)
        return
    if replaced:
        _show_difference(replaced[0], body)
    click.echo(f"schedule {schedule.name}: {_when(schedule)}")
    body.mode = RecurringRunMode.ENABLE if schedule.enabled and not replaced else RecurringRunMode.DISABLE
    made = kfp_api.change(
        api,
        f"create schedule {schedule.name}",
        api.client.recurring_runs.recurring_run_service_create_recurring_run,
        recurring_run=body,
    )
    for each in (each for each in replaced if each.enabled):
        switch(api, each, on=False)
    if schedule.enabled and replaced:
        method = api.client.recurring_runs.recurring_run_service_enable_recurring_run
        new_id = made.recurring_run_id if made else f"<schedule {schedule.name}>"
        kfp_api.change(api, f"switch on schedule {schedule.name}", method, recurring_run_id=new_id)
    for each in replaced:
        _delete_when_idle(api, each)


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
    kfp_api.change(api, what, method, recurring_run_id=schedule.id)


def _body(api: Api, asked: Wanted) -> tuple[Any, str]:
    """What is sent to make it, and the sha256 over all of it but whether it is on: the identity of a schedule."""
    schedule = asked.schedule
    if asked.package is not None:
        standing = registration.prepare(
            api, pipeline=schedule.name, package=asked.package, experiment=schedule.experiment, latest=True
        )
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
    kfp_api.change(
        api,
        f"delete schedule {old.name}",
        api.client.recurring_runs.recurring_run_service_delete_recurring_run,
        recurring_run_id=old.id,
        propagation_policy="ORPHAN",  # a run that began this moment goes on; servers before 2.17 do not know the word
    )


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
