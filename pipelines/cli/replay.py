"""reflux replay: why a training step could not be made."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from reflux.pipelines.cli.options import AS_JSON, DATA_DIR, ENDPOINT, STORE


@click.command()
@click.argument("place")
@AS_JSON
@STORE
@ENDPOINT
@DATA_DIR
def replay(place: str, as_json: bool, store: str, endpoint: str, data_dir: Path) -> None:
    """Make the step at PLACE again, where loss or gradient was not finite, and name what is not finite first.

    PLACE is what the failed stage named, in the store, or a folder with a copy of it.
    """
    from reflux.pipelines.store import stores

    ref, _ = stores.choose(store, endpoint, data_dir)

    from reflux.pipelines import replay as replays  # heavy, so after what is quickly refused

    kept, found = replays.again(place, ref)
    if as_json:
        click.echo(json.dumps({"step": kept.step, "message": kept.message} | asdict(found), indent=2))
        return
    for line in replays.told(kept, found):
        click.echo(line)
