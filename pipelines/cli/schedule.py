"""The group `reflux schedule`: runs that a cluster starts by itself. `apply` reads them from files kept in Git."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from reflux.pipelines.cli.connection import DRY_RUN, connect, connected
from reflux.pipelines.cli.options import AS_JSON
from reflux.pipelines.cli.recipe import IMAGE, SETTINGS


@click.group()
def schedule() -> None:
    """Runs that the cluster starts by itself, without anybody there. Only those that reflux made are touched."""


def _declared(command: Any) -> Any:
    """The options that declare one schedule; a file has the same fields."""
    for option in reversed(
        (
            click.argument("name"),
            click.option("--recipe", metavar="NAME", default="", help="A named run, compiled and uploaded now."),
            click.option("--pipeline", metavar="NAME", default="", help="Instead: one that is registered already."),
            click.option(
                "--cron", metavar="'S M H D M W'", required=True,
                help="Six fields: second minute hour day-of-month month day-of-week, e.g. '0 0 3 * * 1'.",
            ),
            click.option(
                "--time-zone", metavar="ZONE", default="UTC", show_default=True,
                help="That of the cluster's scheduler, which has one for all; it cannot be set from here.",
            ),
            click.option("--arg", "texts", metavar="NAME=VALUE", multiple=True, help="An input of the pipeline."),
            click.option("--experiment", metavar="NAME", default="reflux", show_default=True),
            click.option("--pipeline-root", metavar="URI", default="", help="The default is the server's."),
            click.option("--service-account", metavar="NAME", default="", help="The default is the server's."),
            click.option(
                "--max-concurrency", type=click.IntRange(1, 10), default=1, show_default=True, help="Runs at a time."
            ),
            click.option("--catch-up", is_flag=True, help="Run every time that was missed, not the last alone."),
            click.option("--paused", is_flag=True, help="Made, but it starts no runs until `reflux schedule resume`."),
            click.option("--description", metavar="TEXT", default=""),
            IMAGE,
            SETTINGS,
            DRY_RUN,
            connected,
        )
    ):  # fmt: skip
        command = option(command)
    return command


@schedule.command()
@_declared
def create(**given: Any) -> None:
    """Make schedule NAME. One of that name must not be there."""
    _apply_one(given, there=False)


@schedule.command()
@_declared
def replace(**given: Any) -> None:
    """Replace schedule NAME by another of that name. A run in flight goes on."""
    _apply_one(given, there=True)


@schedule.command()
@click.argument("paths", metavar="FILE|FOLDER…", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--prune", is_flag=True, help="Delete schedules that reflux made and that these files do not name.")
@DRY_RUN
@connected
def apply(paths: tuple[Path, ...], prune: bool, dry_run: bool, **place: Any) -> None:
    """Make the cluster's schedules like the files; `pydoc reflux.pipelines.kubeflow.schedule_file` says how."""
    from reflux.pipelines.kubeflow import schedule, schedule_file

    declared = schedule_file.read(paths)
    api = connect(dry_run, **place)
    wanted = [schedule.wanted(api, each) for each in declared]  # all are checked before the first is changed
    for each in wanted:
        schedule.apply(api, each)
    if prune:
        schedule.prune(api, [each.name for each in declared])


@schedule.command(name="list")
@AS_JSON
@connected
def list_(as_json: bool, **place: Any) -> None:
    """The schedules that reflux made here: when they fire, what they run, what waits to be deleted."""
    from reflux.pipelines.kubeflow import schedule_list

    rows = schedule_list.rows(connect(**place))
    click.echo(json.dumps(rows, indent=2)) if as_json else schedule_list.show(rows)


@schedule.command()
@click.argument("name")
@DRY_RUN
@connected
def pause(name: str, dry_run: bool, **place: Any) -> None:
    """Let schedule NAME start no runs. A run in flight goes on."""
    _switch(name, dry_run, place, on=False)


@schedule.command()
@click.argument("name")
@DRY_RUN
@connected
def resume(name: str, dry_run: bool, **place: Any) -> None:
    """Let schedule NAME start runs again. If a time was missed meanwhile, KFP starts one run at once."""
    _switch(name, dry_run, place, on=True)


@schedule.command()
@click.argument("name")
@DRY_RUN
@connected
def delete(name: str, dry_run: bool, **place: Any) -> None:
    """Delete schedule NAME. While a run of it is in flight it is only switched off, and the exit code is 2."""
    from reflux.pipelines.kubeflow import schedule, schedule_found

    api = connect(dry_run, **place)
    schedule_found.named(api, name)
    for each in schedule_found.found(api, name):
        schedule.delete(api, each)


def _apply_one(given: dict[str, Any], *, there: bool) -> None:
    place = {option: given.pop(option) for option in ("host", "namespace", "token_file", "ca_cert", "kube_context")}
    dry_run, texts, settings, paused = (given.pop(name) for name in ("dry_run", "texts", "settings", "paused"))
    given["image"] = given["image"] or ""

    from reflux.pipelines import recipes
    from reflux.pipelines.kubeflow import schedule, schedule_file, schedule_found

    declared = schedule_file.Schedule(changes=recipes.parse_settings(settings), enabled=not paused, **given)
    api = connect(dry_run, **place)
    found = schedule_found.found(api, declared.name)
    if found and not there:
        raise ValueError(f"schedule {declared.name}: is there already; `reflux schedule replace` changes it")
    if there:
        schedule_found.named(api, declared.name)
    schedule.apply(api, schedule.wanted(api, declared, texts))


def _switch(name: str, dry_run: bool, place: dict[str, Any], *, on: bool) -> None:
    from reflux.pipelines.kubeflow import schedule, schedule_found

    api = connect(dry_run, **place)
    found = schedule_found.named(api, name)
    if found.enabled == on:
        click.echo(f"schedule {name}: is {'on' if on else 'off'} already")
    else:
        schedule.switch(api, found, on=on)
