"""reflux doctor: can this machine run the pipeline, and what is wrong with a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from reflux.pipelines.cli.options import DATA_DIR, ENDPOINT

if TYPE_CHECKING:
    from reflux.pipelines.doctor.finding import Finding

COLORS = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "white"}


@click.command()
@click.argument("run", required=False)
@click.option(
    "--store", metavar="embedded|DIR|s3://…", default="",
    help="Where artifacts are kept; default: embedded, or what RUN records.",
)  # fmt: skip
@ENDPOINT
@DATA_DIR
def doctor(run: str | None, store: str, endpoint: str, data_dir: Path) -> None:
    """Can this machine run the pipeline? With RUN, a run's folder or name, finished or stopped: why does its loss not
    fall? Looked at are data, quantisation, policy, hardware, and whether its bundle answers alike. Every finding
    comes with its remedy.
    """
    failed = False
    for finding in _findings(run, store, endpoint, data_dir):
        failed = failed or finding.status == "fail"
        remedy = f"  ->  {finding.fix}" if finding.fix else ""
        status = click.style(f"{finding.status:4}", fg=COLORS[finding.status])
        click.echo(f"{status}  {finding.check:11} {finding.found}{remedy}")
    if failed:
        sys.exit(1)


def _findings(run: str | None, store: str, endpoint: str, data_dir: Path) -> Iterator[Finding]:
    if run is None:
        from reflux.pipelines.doctor import machine

        return machine.examine(store or "embedded", endpoint, data_dir)
    from reflux.pipelines import runs
    from reflux.pipelines.store import stores

    folder, ref = runs.find(run, data_dir), stores.given(store, endpoint, data_dir)

    from reflux.pipelines.doctor import run as runs_doctor  # heavy, so after what is quickly refused

    return runs_doctor.examine(folder, ref)
