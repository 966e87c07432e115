"""Put the pipeline of a recipe on a cluster, for people who start runs from the UI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from reflux.pipelines.cli.connection import DRY_RUN, connect, connected
from reflux.pipelines.cli.kubeflow import PIPELINE, REQUIRE_DIGESTS, STORE
from reflux.pipelines.cli.recipe import CONFIG, IMAGE, RECIPE, SETTINGS, configured


@click.command()
@RECIPE
@connected
@PIPELINE
@IMAGE
@STORE
@REQUIRE_DIGESTS
@SETTINGS
@CONFIG
@DRY_RUN
def register(
    recipe: str, pipeline: str, image: str | None, store: str, require_digests: bool, settings: tuple[str, ...],
    config: Path | None, dry_run: bool, **place: Any,
) -> None:  # fmt: skip
    """Make the recipe's specification the newest version of its pipeline on a Kubeflow cluster.

    The same specification twice changes nothing. Where KFP keeps pipelines as objects of Kubernetes, `reflux compile
    --as objects` gives what kubectl applies instead.
    """
    full = configured(recipe, config, {}, settings)

    from reflux.pipelines.kubeflow import package, registration  # heavy, so after what is quickly refused

    name = registration.pipeline_name(recipe, pipeline)
    compiled = package.of_recipe(recipe, full, image=image or "", store=store, require_digests=require_digests)
    pipeline_id, version_id = registration.register(
        connect(dry_run, **place), pipeline=name, package=compiled, latest=True
    )
    click.echo(f"pipeline: {name} ({pipeline_id})\nversion: {registration.version_name(name, compiled)} ({version_id})")
