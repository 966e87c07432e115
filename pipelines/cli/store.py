"""The group `reflux store`: the embedded server's life, and what is kept in a store and what goes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from reflux.pipelines.cli.options import AS_JSON, DATA_DIR, ENDPOINT, STORE


@click.group()
def store() -> None:
    """The embedded store: an S3 server on this machine's loopback, with its data under --data-dir."""


@store.command()
@DATA_DIR
def start(data_dir: Path) -> None:
    """Start it or join it, print how to reach it, and keep it up until Ctrl-C or `reflux store stop`."""
    from reflux.pipelines import runs
    from reflux.pipelines.store import embedded_store

    runs.require_writable(data_dir)
    folder = (data_dir / "store").absolute()
    with embedded_store.keeping(folder) as server:
        click.echo(f"endpoint: {server.endpoint}\nbucket: {embedded_store.BUCKET}\nkeys: in {folder / 's3.json'}")
        try:
            while embedded_store.serving(folder) is not None:
                time.sleep(1)
        except KeyboardInterrupt:
            return
        raise ValueError(f"the store ended by itself; see {folder / 'server.log'}")


@store.command()
@DATA_DIR
def stop(data_dir: Path) -> None:
    """End `reflux store start`, and the server unless a command still uses it."""
    from reflux.pipelines.store import embedded_store

    click.echo(embedded_store.release((data_dir / "store").absolute()))


@store.command()
@DATA_DIR
def status(data_dir: Path) -> None:
    """Whether it runs, where, and whether a command uses it."""
    from reflux.pipelines.store import embedded_store

    folder = (data_dir / "store").absolute()
    server = embedded_store.serving(folder)
    if server is None:
        click.echo("the store is stopped; commands start it when they need it")
    else:
        use = (
            "in use"
            if embedded_store.in_use(folder)
            else "used by nobody: the next command, or `reflux store stop`, ends it"
        )
        click.echo(f"the store runs at {server.endpoint} (process {server.pid}), {use}")


@store.command()
@STORE
@ENDPOINT
@AS_JSON
@DATA_DIR
def du(store: str, endpoint: str, as_json: bool, data_dir: Path) -> None:
    """Bytes of every artifact, and what it is kept for."""
    from reflux.pipelines.store import usage

    plan = usage.examine(store, endpoint, usage.Kept(data_dir=data_dir))
    click.echo(json.dumps(usage.to_json(plan), indent=2)) if as_json else usage.show(plan)


@store.command()
@STORE
@ENDPOINT
@click.option(
    "--keep-last", type=int, metavar="N", help="Of the runs, keep what the newest N need; the default is all."
)
@click.option(
    "--keep", multiple=True, metavar="sha256:…|BUNDLE|RUN", help="Keep this, and what it was made from; repeatable."
)
@click.option(
    "--grace-hours",
    type=float,
    default=24.0,
    show_default=True,
    help="What was touched since then stays, with its inputs.",
)
@click.option("--delete", is_flag=True, help="Remove it. Without this, only show what would go.")
@AS_JSON
@DATA_DIR
def gc(
    store: str, endpoint: str, keep_last: int | None, keep: tuple[str, ...], grace_hours: float, delete: bool,
    as_json: bool, data_dir: Path,
) -> None:  # fmt: skip
    """Remove what neither a run of --data-dir nor --keep needs. Runs of other folders in the same store are unknown."""
    from reflux.pipelines.store import usage

    kept = usage.Kept(data_dir=data_dir, last=keep_last, names=keep, grace_hours=grace_hours)
    plan, removed = usage.collect(store, endpoint, kept) if delete else (usage.examine(store, endpoint, kept), None)
    if as_json:
        click.echo(json.dumps([row for row in usage.to_json(plan) if row["goes"]], indent=2))
    else:
        usage.show_going(plan, removed)
