"""Watching a run on a cluster: a line for each change of a task, until the run has ended.

kfp's own wait asks until the run has ended in one of four ways, of which "canceled" is none, and gives up at the first
answer that fails. Here a run that was ended by hand is an end, and a server that is away is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import click

from reflux.pipelines.kubeflow import kfp_api, package
from reflux.pipelines.kubeflow.kfp_api import Api, OutOfReachError, RefusedError

ENDED = {"SUCCEEDED", "FAILED", "CANCELED", "SKIPPED"}
PATIENCE_S = 900
"""How long a server may be away before watching ends. The run itself does not notice."""

_LONGEST_PAUSE_S = 60
_COLORS = {"SUCCEEDED": "green", "FAILED": "red", "CANCELED": "red", "RUNNING": "cyan"}


class LostSightError(Exception):
    """The server was away for too long; how the run ends is not known."""


def follow(api: Api, run_id: str, *, poll_s: float) -> Any:
    """Show the run until it has ended; the run as the API describes it then.

    RefusedError if there is no such run or it may not be seen, LostSightError if the server stays away.
    """
    method = api.client.runs.run_service_get_run
    run = _patiently(api, poll_s, method, run_id=run_id)
    names = _task_names(api, poll_s, run)
    shown: dict[str, str] = {}
    while True:
        _show(run, names, shown)
        if run.state in ENDED:
            return run
        time.sleep(poll_s)
        run = _patiently(api, poll_s, method, run_id=run_id)


def _patiently(api: Api, poll_s: float, method: Callable[..., Any], **arguments: Any) -> Any:
    """The answer, however often it has to be asked for. LostSightError when nothing came for PATIENCE_S."""
    began = time.monotonic()
    pause_s = poll_s
    said = False
    while True:
        try:
            answer = kfp_api.one(api, method, **arguments)
        except (OutOfReachError, RefusedError) as error:
            if isinstance(error, RefusedError) and error.status != 401:  # a token file may be about to be renewed
                raise
            away_s = time.monotonic() - began
            if away_s > PATIENCE_S:
                raise LostSightError(f"{error}; no other answer for {away_s / 60:.0f} minutes") from error
            if not said:
                click.echo(f"{_clock()}  {error}; trying again. The run goes on meanwhile.", err=True)
            said = True
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        else:
            if said:
                click.echo(f"{_clock()}  {api.host}: answers again", err=True)
            return answer


def _show(run: Any, names: set[str] | None, shown: dict[str, str]) -> None:
    """Print what is new since `shown`: task id -> the state that was printed last. The run itself is the key ""."""
    details = (run.run_details.task_details if run.run_details else None) or []
    for task in sorted(details, key=lambda task: str(task.create_time)):
        new = task.state and task.state != shown.get(task.task_id)
        if new and (names is None or task.display_name in names):
            shown[task.task_id] = task.state
            _line(task.display_name, task.state, _took(task) or _reason(task))
    if run.state and run.state != shown.get(""):
        shown[""] = run.state
        _line(f"run {run.display_name}", run.state, _reason(run))


def _line(name: str, state: str, remark: str) -> None:
    colored = click.style(state.lower(), fg=_COLORS.get(state))
    click.echo(f"{_clock()}  {name:24} {colored}{f'  {remark}' if remark else ''}")


def _took(task: Any) -> str:
    if task.state != "SUCCEEDED" or task.start_time is None or task.end_time is None:
        return ""
    return f"{max(0.0, (task.end_time - task.start_time).total_seconds()):.0f} s"


def _reason(thing: Any) -> str:
    return " ".join(thing.error.message.split()) if thing.error and thing.error.message else ""


def _task_names(api: Api, poll_s: float, run: Any) -> set[str] | None:
    """The tasks that people wrote; KFP lists its own beside them. None, which shows all, if the version is gone."""
    if isinstance(run.pipeline_spec, Mapping):
        return package.tasks(package.unwrapped(run.pipeline_spec))
    reference = run.pipeline_version_reference
    if reference is None:
        return None
    ids = {"pipeline_id": reference.pipeline_id, "pipeline_version_id": reference.pipeline_version_id}
    try:
        version = _patiently(api, poll_s, api.client.pipelines.pipeline_service_get_pipeline_version, **ids)
    except RefusedError:
        return None
    return package.tasks(package.unwrapped(version.pipeline_spec))


def _clock() -> str:
    return time.strftime("%H:%M:%S")
