"""Options that say where the API of Kubeflow Pipelines is, and the client that they make together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

DRY_RUN = click.option("--dry-run", is_flag=True, help="Read only, and show every request that would change something.")
POLL = click.option(
    "--poll", "poll_s", type=click.FloatRange(min=0.1), default=10.0, show_default=True, metavar="SECONDS",
    help="Pause between two looks at the run.",
)  # fmt: skip

_FILE = click.Path(dir_okay=False, path_type=Path)
_OPTIONS = (
    click.option("--host", metavar="URL", default="", help="Of the API; the default is KF_PIPELINES_ENDPOINT."),
    click.option("--namespace", metavar="NAME", default="", help="Yours, where Kubeflow serves many users."),
    click.option("--token-file", type=_FILE, help="A bearer token, read anew for every request."),
    click.option(
        "--ca-cert",
        type=_FILE,
        envvar="SSL_CERT_FILE",
        help="Certificates to trust, PEM; the default is SSL_CERT_FILE.",
    ),
    click.option("--kube-context", metavar="NAME", default="", help="Reach the API through kubectl's configuration."),
)


def connected(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a connection, which reach the command as keyword arguments for `connect`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def connect(dry_run: bool = False, **given: Any) -> Any:
    """Reach the server; kfp is imported only here, so that help and a wrong option do not wait for it."""
    from reflux.pipelines.kubeflow import kfp_api

    return kfp_api.connect(kfp_api.Connection(**given), dry_run=dry_run)
