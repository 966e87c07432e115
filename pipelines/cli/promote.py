"""The command `reflux promote`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from reflux.pipelines.cli.options import DATA_DIR, ENDPOINT, OTHER_STORE

REFUSED = 3  # as `reflux run` reports a failed gate


@click.command()
@click.argument("model")
@click.option("--version", type=int, metavar="N", help="Instead of the candidate, which is the newest version.")
@click.option(
    "--metric",
    metavar="NAME",
    default="perplexity",
    show_default=True,
    help="Of the evaluation's table; the candidate has to be better in it than the champion.",
)
@click.option("--force", is_flag=True, help="Promote in spite of objections. Needs --reason.")
@click.option("--reason", metavar="TEXT", default="", help="Recorded with the promotion.")
@click.option("--rollback", is_flag=True, help="Make the champion before this one the champion again.")
@OTHER_STORE
@ENDPOINT
@DATA_DIR
def promote(
    model: str, version: int | None, metric: str, force: bool, reason: str, rollback: bool, store: str, endpoint: str,
    data_dir: Path,
) -> None:  # fmt: skip
    """Make the candidate of MODEL, a registered model of MLflow, its champion, if it passed its gate and is better.

    Exit code 3: it is not, and nothing changed.
    """
    from reflux.pipelines.review import promotion
    from reflux.pipelines.store import stores

    other = stores.given(store, endpoint, data_dir)
    if rollback:
        if version is not None or force:
            raise ValueError("--rollback: goes to the previous champion, without --version and --force")
        click.echo(promotion.roll_back(model, reason, data_dir=data_dir, store=other))
        return
    asked = promotion.Asked(model=model, version=version, metric=metric, force=force, reason=reason)
    try:
        click.echo(promotion.promote(asked, data_dir=data_dir, store=other))
    except promotion.RefusedError as error:
        click.echo(str(error), err=True)
        sys.exit(REFUSED)
