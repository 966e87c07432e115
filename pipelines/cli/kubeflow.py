"""Commands for a cluster: compile."""

from __future__ import annotations

from pathlib import Path

import click

from reflux.pipelines.cli.recipe import CONFIG, IMAGE, RECIPE, SETTINGS, configured


@click.command(name="compile")
@RECIPE
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write; the default is the terminal.",
)
@IMAGE
@SETTINGS
@CONFIG
def compile_(
    recipe: str, output: Path | None, image: str | None, settings: tuple[str, ...], config: Path | None
) -> None:
    """The KFP specification of a recipe, for `kfp` or the Pipelines UI."""
    from reflux.pipelines.compile import compile_to_text
    from reflux.pipelines.distillation import distillation

    text = compile_to_text(distillation(configured(recipe, config, {}, settings), image or ""))
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"--output {output}: there is no folder {output.parent}; make it first") from None
    except OSError as error:
        raise ValueError(f"--output {output}: cannot be written ({error.strerror})") from None
