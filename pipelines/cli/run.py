"""reflux run: a recipe on this machine."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import click

from reflux.pipelines.cli.options import DATA_DIR, ENDPOINT, STORE
from reflux.pipelines.cli.recipe import CONFIG, IMAGE, RECIPE, SETTINGS, configured

GATE_FAILED = 3
INTERRUPTED = 130  # as a shell reports Ctrl-C
CONTINUES = "What is done is kept: the same command goes on from there."


@click.command()
@RECIPE
@STORE
@ENDPOINT
@click.option(
    "--runner",
    type=click.Choice(["process", "docker"]),
    default="process",
    show_default=True,
    help="What runs the stages.",
)
@IMAGE
@click.option("--network", metavar="NAME", help="Of the containers; host, the default, reaches this machine's servers.")
@click.option("--memory", metavar="SIZE", help="Limit of a container, e.g. 8g; the default is none.")
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    help="How often a stage is started again whose container was killed; the default is 1.",
)
@click.option(
    "--teacher", metavar="MODEL", default="", help="Folder, GGUF file, s3:// prefix, package:<module> or hub id."
)
@click.option("--student", metavar="MODEL", default="", help="The same; shares the teacher's tokenizer.")
@click.option("--prompts", metavar="URI", default="", help="JSONL, CSV or Parquet, local or s3://.")
@click.option("--labels", metavar="URI", default="", help="Expert ratings: an export, JSONL, CSV or Parquet.")
@click.option("--eval-text", metavar="URI", default="", help="UTF-8 text for perplexity.")
@click.option("--entity-model", metavar="MODEL", default="", help="Counts named entities in prompts; none without it.")
@click.option("--start", metavar="URI", default="", help="An earlier distill, objects/distill/KEY, to go on from.")
@SETTINGS
@CONFIG
@click.option(
    "--name",
    metavar="RUN",
    default="",
    help="Name of the run; the default is RECIPE-TIME, or the unfinished run of the same configuration.",
)
@DATA_DIR
def run(
    recipe: str, store: str, endpoint: str, runner: str, name: str, data_dir: Path, settings: tuple[str, ...],
    config: Path | None, image: str | None, network: str | None, memory: str | None, retries: int | None,
    **sources: str,
) -> None:  # fmt: skip
    """Run a recipe from prompts to the evaluated bundle. After an interruption the same command continues."""
    from reflux.pipelines.store import stores

    containers = _containers(runner, image=image, network=network, memory=memory, retries=retries)
    full = configured(recipe, config, sources, settings)
    ref, remark = stores.choose(store, endpoint, data_dir)
    if remark:
        click.echo(remark, err=True)

    from reflux.pipelines.run import StageError, run_recipe  # heavy, so after everything that is quickly refused

    try:
        passed = run_recipe(recipe, full, ref, data_dir=data_dir, name=name, containers=containers)
    except StageError as error:
        advice = f"\n{CONTINUES}" if error.may_pass else ""
        raise click.ClickException(f"stage {error}{advice}") from error
    except KeyboardInterrupt:
        click.echo(f"interrupted. {CONTINUES}", err=True)
        sys.exit(INTERRUPTED)
    if not passed:
        sys.exit(GATE_FAILED)


def _containers(runner: str, **chosen: Any) -> Any:
    """How stages run in containers, None for processes."""
    given = {name: value for name, value in chosen.items() if value is not None}
    if runner == "process":
        for name in given:
            raise ValueError(f"--{name} belongs to --runner docker")
        return None
    if importlib.util.find_spec("docker") is None:
        raise ValueError("--runner docker needs Docker's Python package: pip install 'reflux[docker]'")
    from reflux.pipelines.machine.docker_runner import Containers

    return Containers(**given)
