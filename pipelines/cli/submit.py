"""Commands of a run on a cluster: submit, and watch, which goes on where `submit --wait` was interrupted.

Exit codes of both: 0 the run succeeded, and its gate passed as far as that can be known; 1 it failed or was canceled;
2 the command, its input, the server or the rights are wrong, and no run was made; 3 it succeeded and its gate says
fail; 4 the server was away too long, so how the run ends is not known; 130 interrupted, the run goes on.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from reflux.pipelines.cli.connection import DRY_RUN, POLL, connect, connected
from reflux.pipelines.cli.recipe import CONFIG, IMAGE, RECIPE, SETTINGS, configured
from reflux.pipelines.cli.run import GATE_FAILED, INTERRUPTED

FAILED = 1
UNKNOWN = 4


@click.command()
@RECIPE
@connected
@click.option(
    "--arg", "texts", metavar="NAME=VALUE", multiple=True,
    help="An input of the pipeline, in its type; lists and tables in JSON. Repeatable.",
)  # fmt: skip
@click.option("--name", metavar="RUN", default="", help="Name of the run; the default is RECIPE-TIME.")
@click.option(
    "--pipeline", metavar="NAME", default="", help="Under which it is uploaded; the default is reflux-RECIPE-submitted."
)
@click.option(
    "--experiment", metavar="NAME", default="reflux", show_default=True,
    envvar="KF_PIPELINES_DEFAULT_EXPERIMENT_NAME", help="Made if it is not there.",
)  # fmt: skip
@click.option(
    "--pipeline-root", metavar="URI", default="", help="Where KFP keeps artifacts; the default is the server's."
)
@click.option("--service-account", metavar="NAME", default="", help="Of the run's pods; the default is the server's.")
@click.option("--require-digests", is_flag=True, help="Refuse images that are named by a tag alone.")
@IMAGE
@SETTINGS
@CONFIG
@DRY_RUN
@click.option("--wait", is_flag=True, help="Show what the tasks do, and return how the run ended.")
@POLL
def submit(
    recipe: str, settings: tuple[str, ...], config: Path | None, image: str | None, require_digests: bool,
    dry_run: bool, wait: bool, poll_s: float, host: str, namespace: str, token_file: Path | None, ca_cert: Path | None,
    kube_context: str, **asked: Any,
) -> None:  # fmt: skip
    """Start a run on a Kubeflow cluster. Nothing is made there before everything that can be checked is right.

    Exit codes with --wait: 0 succeeded, 1 failed or canceled, 2 no run was made, 3 the gate says fail, 4 the server was
    away too long, 130 interrupted while the run goes on.
    """
    full = configured(recipe, config, {}, settings)
    place = {"host": host, "namespace": namespace, "kube_context": kube_context}

    from reflux.pipelines.kubeflow import package, submit  # heavy, so after what is quickly refused

    compiled = package.of_recipe(recipe, full, image=image or "", require_digests=require_digests)
    run = submit.asked(compiled, recipe=recipe, config=full, **asked)
    api = connect(dry_run, **place, token_file=token_file, ca_cert=ca_cert)
    run_id = submit.submit(api, run)
    if not run_id:
        return
    click.echo(f"run: {run_id}")
    if page := submit.page(api, run_id):
        click.echo(f"page: {page}")
    if wait:
        _finish(api, run_id, poll_s, again=_command(run_id, **place, token_file=token_file, ca_cert=ca_cert))


@click.command()
@click.argument("run_id")
@connected
@POLL
def watch(run_id: str, poll_s: float, **place: Any) -> None:
    """Show what the tasks of a run on a cluster do until it ends. RUN_ID is what `submit` printed.

    Exit codes: as `reflux submit --wait`.
    """
    _finish(connect(**place), run_id, poll_s, again=_command(run_id, **place))


def _finish(api: Any, run_id: str, poll_s: float, *, again: str) -> None:
    """Watch to the end and exit with the outcome. `again` is the command that goes on watching."""
    from reflux.pipelines.kubeflow import kfp_api, watch

    try:
        run = watch.follow(api, run_id, poll_s=poll_s)
    except KeyboardInterrupt:
        click.echo(f"interrupted. The run goes on; to see it again: {again}", err=True)
        sys.exit(INTERRUPTED)
    except (watch.LostSightError, kfp_api.RefusedError) as error:
        if getattr(error, "status", 0) == 404:
            raise
        click.echo(f"{error}. The run may go on; to see it again: {again}", err=True)
        sys.exit(UNKNOWN)
    if run.state != "SUCCEEDED":
        sys.exit(FAILED)
    _tell_verdict(run_id)


def _tell_verdict(run_id: str) -> None:
    from reflux.pipelines.kubeflow import verdict

    said, why = verdict.of(run_id)
    click.echo(f"verdict: {said or f'not known here: {why}'}")
    if said == "fail":
        sys.exit(GATE_FAILED)


def _command(run_id: str, **place: Any) -> str:
    """The command line that watches this run, as it was reached now."""
    flags = [f"--{name.replace('_', '-')}={shlex.quote(str(value))}" for name, value in place.items() if value]
    return " ".join(["reflux watch", run_id, *flags])
