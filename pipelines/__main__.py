"""The command line: reflux run | report | label-tasks | compile | lineage | doctor | store.

Commands are thin: each parses, calls one function of its module, prints. Modules are imported inside the commands, so
that `reflux --help` starts at once and a command needs no more packages than its own work does.

Exit codes: 0 done; 1 a stage failed or an object does not match; 2 the command or its input is wrong; 3 the run is
complete and its gate says fail; 130 interrupted.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import click

GATE_FAILED = 3
INTERRUPTED = 130  # as a shell reports Ctrl-C
CONTINUES = "What is done is kept: the same command goes on from there."

DATA_DIR = click.option(
    "--data-dir", type=click.Path(file_okay=False, path_type=Path), default=Path("reflux-data"), show_default=True,
    help="Where runs, the embedded store and MLflow's database live.",
)  # fmt: skip
STORE = click.option(
    "--store", metavar="embedded|DIR|s3://…", default="embedded", show_default=True, help="Where artifacts are kept."
)
OTHER_STORE = click.option(
    "--store", metavar="embedded|DIR|s3://…", default="", help="Instead of the store that the run or bundle records."
)
ENDPOINT = click.option("--endpoint", metavar="URL", default="", help="Of an S3 server other than AWS.")
RECIPE = click.option("--recipe", metavar="NAME", required=True, help="A named run, e.g. demo.")
SETTINGS = click.option(
    "--set", "settings", metavar="STAGE.FIELD=VALUE", multiple=True, help="Change one value; repeatable."
)
CONFIG = click.option(
    "--config", type=click.Path(dir_okay=False, path_type=Path), help="JSON or TOML file, one table per stage."
)
IMAGE = click.option("--image", metavar="NAME", help="Of the containers; the default is reflux's own for the CPU.")
AS_JSON = click.option("--json", "as_json", is_flag=True, help="For machines.")


class WrongInput(click.ClickException):
    """The command or what it names is wrong."""

    exit_code = 2


class Commands(click.Group):
    """Turns the errors that modules raise for people into a message and an exit code; others keep their traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, OSError) as error:
            raise WrongInput(str(error)) from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="reflux")
def cli() -> None:
    """Distil a large teacher into a small, low-bit student, and keep the trail from which anyone can verify it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as Ctrl-C: leave the store in order


@cli.command()
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
    from reflux.pipelines import stores

    containers = _containers(runner, image=image, network=network, memory=memory, retries=retries)
    full = _recipe(recipe, config, sources, settings)
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


@cli.command()
@click.argument("run")
@AS_JSON
@OTHER_STORE
@ENDPOINT
@DATA_DIR
def report(run: str, as_json: bool, store: str, endpoint: str, data_dir: Path) -> None:
    """The table of RUN, a run's folder or name: every scheme beside the full-precision model."""
    from reflux.pipelines import report as reports
    from reflux.pipelines import runs, stores

    result = reports.read(runs.find(run, data_dir), stores.given(store, endpoint, data_dir))
    click.echo(reports.machine_readable(result)) if as_json else reports.show(result)


@cli.command(name="label-tasks")
@click.argument("run")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), required=True,
    help="JSON file to write; the labelling configuration goes beside it, as .xml.",
)  # fmt: skip
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="A random sample of N answers; default: all.")
@OTHER_STORE
@ENDPOINT
@DATA_DIR
def label_tasks(run: str, output: Path, limit: int | None, store: str, endpoint: str, data_dir: Path) -> None:
    """The answers of RUN as a project for Label Studio, whose JSON export is what --labels reads."""
    from reflux.pipelines import label_tasks as tasks
    from reflux.pipelines import runs, stores

    number, config = tasks.write(runs.find(run, data_dir), output, stores.given(store, endpoint, data_dir), limit)
    click.echo(f"{number} tasks: {output}; labelling configuration: {config}")


@cli.command(name="compile")
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

    text = compile_to_text(distillation(_recipe(recipe, config, {}, settings), image or ""))
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"--output {output}: there is no folder {output.parent}; make it first") from None
    except OSError as error:
        raise ValueError(f"--output {output}: cannot be written ({error.strerror})") from None


@cli.command()
@click.argument("run_or_bundle", metavar="RUN_OR_BUNDLE|sha256:…")
@AS_JSON
@click.option("--expect", metavar="sha256:…", help="The digest that the root must have.")
@OTHER_STORE
@ENDPOINT
@DATA_DIR
def lineage(run_or_bundle: str, as_json: bool, expect: str | None, store: str, endpoint: str, data_dir: Path) -> None:
    """Rebuild where a run or a bundle came from, from manifests alone, and verify every digest on the way.

    With --store the digest of an artifact, such as a run's root, is enough: nothing but the store is read.
    """
    from reflux.pipelines import lineage as lineages

    chain = lineages.verify(run_or_bundle, expect=expect, store=store, endpoint=endpoint, data_dir=data_dir)
    click.echo(json.dumps(chain.to_json(), indent=2)) if as_json else lineages.show(chain)
    if chain.mismatches:
        for mismatch in chain.mismatches:
            click.echo(f"does not match: {mismatch}", err=True)
        sys.exit(1)


@cli.command()
@STORE
@ENDPOINT
@DATA_DIR
def doctor(store: str, endpoint: str, data_dir: Path) -> None:
    """Can this machine run the pipeline? Every finding comes with its remedy."""
    from reflux.pipelines.doctor import examine

    colors = {"ok": "green", "warn": "yellow", "fail": "red"}
    failed = False
    for finding in examine(store, endpoint, data_dir):
        failed = failed or finding.status == "fail"
        remedy = f"  ->  {finding.fix}" if finding.fix else ""
        status = click.style(f"{finding.status:4}", fg=colors[finding.status])
        click.echo(f"{status}  {finding.check:9} {finding.found}{remedy}")
    if failed:
        sys.exit(1)


@cli.group()
def store() -> None:
    """The embedded store: an S3 server on this machine's loopback, with its data under --data-dir."""


@store.command()
@DATA_DIR
def start(data_dir: Path) -> None:
    """Start it or join it, print how to reach it, and keep it up until Ctrl-C or `reflux store stop`."""
    from reflux.pipelines import embedded_store, runs

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
    from reflux.pipelines import embedded_store

    click.echo(embedded_store.release((data_dir / "store").absolute()))


@store.command()
@DATA_DIR
def status(data_dir: Path) -> None:
    """Whether it runs, where, and whether a command uses it."""
    from reflux.pipelines import embedded_store

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
    from reflux.pipelines import usage

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
    from reflux.pipelines import usage

    kept = usage.Kept(data_dir=data_dir, last=keep_last, names=keep, grace_hours=grace_hours)
    plan, removed = usage.collect(store, endpoint, kept) if delete else (usage.examine(store, endpoint, kept), None)
    if as_json:
        click.echo(json.dumps([row for row in usage.to_json(plan) if row["goes"]], indent=2))
    else:
        usage.show_going(plan, removed)


def _containers(runner: str, **chosen: Any) -> Any:
    """How stages run in containers, None for processes."""
    given = {name: value for name, value in chosen.items() if value is not None}
    if runner == "process":
        for name in given:
            raise ValueError(f"--{name} belongs to --runner docker")
        return None
    if importlib.util.find_spec("docker") is None:
        raise ValueError("--runner docker needs Docker's Python package: pip install 'reflux[docker]'")
    from reflux.pipelines.docker_runner import Containers

    return Containers(**given)


def _recipe(name: str, config: Path | None, sources: dict[str, str], settings: tuple[str, ...]) -> Any:
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


def main() -> None:
    cli(prog_name="reflux")


if __name__ == "__main__":
    main()
