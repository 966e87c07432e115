"""Options that name a recipe and change it, and the configuration that they make together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

RECIPE = click.option("--recipe", metavar="NAME", required=True, help="A named run, e.g. demo.")
SETTINGS = click.option(
    "--set", "settings", metavar="STAGE.FIELD=VALUE", multiple=True, help="Change one value; repeatable."
)
CONFIG = click.option(
    "--config", type=click.Path(dir_okay=False, path_type=Path), help="JSON or TOML file, one table per stage."
)
IMAGE = click.option("--image", metavar="NAME", help="Of the containers; the default is reflux's own for the CPU.")


def configured(name: str, config: Path | None, sources: dict[str, str], settings: tuple[str, ...]) -> Any:
    """The recipe with everything a person changed, later over earlier."""
    from reflux.pipelines import recipes

    recipe = recipes.named(name)
    if config is not None:
        recipe = recipes.overridden(recipe, recipes.read_changes(config))
    given = {option if option in recipes.SOURCES else f"{option}_uri": uri for option, uri in sources.items() if uri}
    if recipe.labels_uri and {"teacher", "prompts_uri"} & given.keys() and "labels_uri" not in given:
        click.echo(f"without labels: {recipe.labels_uri} rates other answers; give your own with --labels", err=True)
        given["labels_uri"] = ""
    return recipes.overridden(recipes.overridden(recipe, given), recipes.parse_settings(settings))
