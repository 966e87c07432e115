"""`reflux run`: from a recipe to a finished run's folder, on this machine.

Everything that can be refused is refused before the first stage starts. After that nothing is lost: stages commit to
the store, so an interrupted or failed run is continued by the same command.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reflux.components import tracking
from reflux.components.artifacts import Artifact
from reflux.components.provenance import public_uri
from reflux.components.storage import S3Settings, Store
from reflux.pipelines import recipes, runs
from reflux.pipelines.compile import compile_to_text
from reflux.pipelines.distillation import distillation
from reflux.pipelines.machine.local_session import Runner, StageError, StageResult, run_pipeline
from reflux.pipelines.machine.process_runner import in_processes
from reflux.pipelines.review import registered_models, report, written_out
from reflux.pipelines.store import stores

if TYPE_CHECKING:
    from reflux.pipelines.machine.docker_runner import Containers


def run_recipe(
    recipe_name: str, recipe: recipes.Recipe, ref: stores.StoreRef, *, data_dir: Path, name: str,
    containers: Containers | None = None,
) -> bool:  # fmt: skip
    """Run it, write RUN/run.json, report.html and bundle/, print the results. Returns whether the gate passed.

    Stages run in processes of this machine unless `containers` says how they run in containers. ValueError or OSError
    for what is wrong beforehand; StageError if a stage fails.
    """
    runs.check_name(name)
    if containers is not None:
        from reflux.pipelines.machine import docker_runner  # needs a package that other runs do without

        docker_runner.check(containers)
    runs.require_writable(data_dir)
    configs = recipe.stages()
    _set_defaults(data_dir)
    with stores.opened(ref, create=True) as (opened, environment):
        for line in _checked(configs, opened, S3Settings.from_env({**os.environ, **environment})):
            click.echo(line)
        values = {stage: asdict(config) for stage, config in configs.items()}
        digest = runs.config_digest(recipe_name, values, ref)
        with runs.claimed(data_dir, recipe_name, digest, name) as folder:
            record = runs.RunRecord(
                run=folder.name, recipe=recipe_name, store=ref, configs=values, config_digest=digest
            )
            record = _run_stages(folder, record, recipe, opened, environment, containers)
            write_out(folder, opened, record)
            table = report.from_artifact(opened, record.run, record.artifacts["evaluate"]["key"])
            root = record.artifacts["evaluate"]["digest"]
            record = replace(record, status="finished", verdict=table["verdict"], root=root)
            runs.write(folder, record)
            tracking.end_pipeline(
                record.run, status="FINISHED", verdict=record.verdict, root=record.root, report=folder / "report.html"
            )
    _print_end(folder, record, table)
    return record.verdict == "pass"


def _checked(configs: Mapping[str, Any], store: Store, settings: S3Settings) -> list[str]:
    """What preflight remarks. In a process of its own: the half GB of libraries that it loads would otherwise stay in
    memory beside the stages.
    """
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_check, configs, store.uri, getattr(store, "settings", None), settings).result()


def _check(
    configs: Mapping[str, Any], store_uri: str, store_settings: S3Settings | None, settings: S3Settings
) -> list[str]:
    from reflux.components import preflight

    return preflight.check(configs, Store.open(store_uri, store_settings), settings)


def _run_stages(
    folder: Path, record: runs.RunRecord, recipe: recipes.Recipe, store: Store, environment: dict[str, str],
    containers: Containers | None,
) -> runs.RunRecord:  # fmt: skip
    """The record with every stage's artifact; run.json has each as soon as it is committed."""
    runner, image, sources = _runner(folder, record, recipe, environment, containers)

    before = runs.read(folder).status if (folder / runs.RECORD).exists() else ""
    keep = before == "finished"  # a finished record stands until the repetition is finished as well

    def note(stage: str, result: StageResult) -> None:
        record.artifacts[stage] = {"key": result.key, "digest": result.digest}
        if not keep:
            runs.write(folder, record)

    verb = {"": "begins", "finished": "is repeated"}.get(before, "continues")
    click.echo(f"run {record.run} {verb}, store {record.store.described()}")
    if not keep:
        runs.write(folder, record)
    known = {"recipe": record.recipe, "store": record.store.uri, **_sources(recipe)}
    tracking.begin_pipeline(record.run, known, store=store)
    status = "KILLED"
    try:
        run_pipeline(
            compile_to_text(distillation(recipe, image, name=record.recipe, attended=True)),
            {"store": record.store.uri, "run": record.run, **sources},
            root=folder / "kfp",
            runner=runner,
            on_finished=note,
        )
        status = "FINISHED"
        return record
    except StageError:
        status = "FAILED"
        if not keep:
            runs.write(folder, replace(record, status="failed"))
        raise
    finally:
        if status != "FINISHED":
            tracking.end_pipeline(record.run, status=status)


def _runner(
    folder: Path, record: runs.RunRecord, recipe: recipes.Recipe, environment: dict[str, str],
    containers: Containers | None,
) -> tuple[Runner, str, dict[str, str]]:  # fmt: skip
    """What runs the stages, their image, and the URIs of the sources where stages see other paths than this process."""
    if containers is None:
        return in_processes(environment), "", {}
    from reflux.pipelines.machine import container_mounts, docker_runner

    seen = container_mounts.view(
        _sources(recipe), record.store, {**os.environ, **environment}, network=containers.network
    )
    lock = (folder / runs.LOCK).absolute()
    return docker_runner.in_containers(containers, seen, run=record.run, lock=lock), containers.image, seen.sources


def _set_defaults(data_dir: Path) -> None:
    """Where MLflow writes, unless the environment says so, and silence where libraries would draw their own bars."""
    defaults = {
        "MLFLOW_TRACKING_URI": registered_models.database_uri(data_dir),
        "MLFLOW_LOGGING_LEVEL": "WARNING",  # else it tells every migration of its new database
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # of every stage; the run's end says it once
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def write_out(folder: Path, store: Store, record: runs.RunRecord) -> None:
    """RUN/bundle/ and the pages beside it, verified copies of what the stages committed."""
    for stage, page in written_out.PAGES.items():
        Artifact.open(store, stage, record.artifacts[stage]["key"]).download(page, folder / page)
    bundle = Artifact.open(store, "calibrate", record.artifacts["calibrate"]["key"])
    partial = folder / ".bundle.partial"
    shutil.rmtree(partial, ignore_errors=True)
    bundle.download_all("", partial)
    (partial / "manifest.json").write_bytes(bundle.bytes)
    (partial / stores.BESIDE).write_text(json.dumps(record.store.to_json(), indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(folder / "bundle", ignore_errors=True)
    partial.rename(folder / "bundle")


def _print_end(folder: Path, record: runs.RunRecord, table: dict[str, Any]) -> None:
    click.echo()
    report.show(table)
    click.echo(f"report: {folder / 'report.html'}")
    click.echo(f"bundle: {folder / 'bundle'}")
    click.echo(f"tracking: {_tracking()}")
    click.echo(f"root: {record.root}")
    click.echo(f"run: {folder}")


def _tracking() -> str:
    """A server's address, else what opens the UI, written so that it works without an activated environment."""
    uri = os.environ["MLFLOW_TRACKING_URI"]
    if not uri:
        return "off"
    if uri.startswith(("http://", "https://")):
        return public_uri(uri)
    program = Path(sys.executable).with_name("mlflow")
    name = str(program) if program.exists() else "mlflow"
    return shlex.join([name, "ui", "--backend-store-uri", uri])


def _sources(recipe: recipes.Recipe) -> dict[str, str]:
    return {source: getattr(recipe, source) for source in recipes.SOURCES}
