"""A bundle that passed its gate is one version of its model, however often and by how many it is registered."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from mlflow.store.model_registry.dbmodels.models import SqlRegisteredModelAlias
from registered_bundles import MODEL, register
from servers import kfp_plugin
from sqlalchemy import event
from sqlalchemy.orm import Session

from reflux.components import __main__ as entry
from reflux.components import registry
from reflux.components.artifacts import Artifact
from reflux.components.storage import Store


@pytest.fixture(scope="module")
def database(empty_mlflow: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{shutil.copy(empty_mlflow, tmp_path_factory.mktemp('mlflow'))}"


@pytest.fixture
def client(database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    for name in ("MLFLOW_RUN_ID", "REFLUX_PARENT_PID"):
        monkeypatch.delenv(name, raising=False)
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=database)
    yield client
    for model in client.search_registered_models():
        client.delete_registered_model(model.name)
    for run in client.search_runs([each.experiment_id for each in client.search_experiments()]):
        client.delete_run(run.info.run_id)


def brew_and_pour(root: Path, *, sweet: str = "true", minutes: str = "3", run: str = "r1") -> None:
    """A bundle (brew's tea) and the stage that judges it (pour), which registers it."""
    at = ["--store", str(root / "store"), "--run", run]
    assert entry.main(["toy_stages.brew", *at, "--out-tea", str(root / "tea.json"), "--minutes", minutes]) == 0
    more = ["--tea", str(root / "tea.json"), "--out-cup", str(root / "cup.json"), "--sweet", sweet]
    assert entry.main(["toy_stages.pour", *at, *more, "--registered-model", "tea"]) == 0


def test_a_passed_gate_makes_a_version_that_leads_to_everything(tmp_path: Path, client: Any) -> None:
    store = Store.open(str(tmp_path / "store"))
    began = kfp_plugin.api_server_creates_the_run(client, experiment="reflux")
    client.log_param(began.info.run_id, "recipe", "demo")
    for name, value in {"reflux.run": "r1", "reflux.role": "pipeline"}.items():
        client.set_tag(began.info.run_id, name, value)
    brew_and_pour(tmp_path)
    brew_and_pour(tmp_path)  # a retry finds what it made
    (version,) = client.search_model_versions("name = 'tea'")
    tea = Artifact.load(store, (tmp_path / "tea.json").read_bytes())
    cup = Artifact.load(store, (tmp_path / "cup.json").read_bytes())
    assert version.source == tea.uri
    parent = client.get_run(version.run_id)
    assert parent.info.run_id == began.info.run_id
    assert version.tags == {
        "reflux.digest": tea.digest,
        "reflux.root": cup.digest,
        "reflux.root_place": f"pour/{cup.key}",
        "reflux.run": "r1",
        "reflux.recipe": "demo",
        "reflux.verdict": "pass",
        "kfp.pipeline_run_id": kfp_plugin.JOB,
        "kfp.pipeline_run_url": f"https://kubeflow.example/#/runs/details/{kfp_plugin.JOB}",
        "kfp.pipeline_id": "p1",
        "kfp.pipeline_version_id": "v1",
    }
    assert f"[pipeline run](https://kubeflow.example/#/runs/details/{kfp_plugin.JOB})" in version.description
    assert f"reflux lineage {tea.digest} --store {store.uri}" in version.description
    assert client.get_registered_model("tea").aliases == {"candidate": version.version}
    read = registry.resolve(client, "models:/tea@candidate")
    assert (read.store, read.stage, read.key, read.digest) == (store.uri, "brew", tea.key, tea.digest)


def test_a_failed_gate_makes_none(tmp_path: Path, client: Any) -> None:
    brew_and_pour(tmp_path, sweet="false")
    assert client.search_registered_models() == []


def test_the_candidate_is_the_newest_and_a_repeated_run_is_no_news(tmp_path: Path, client: Any) -> None:
    for minutes, run in (("3", "r1"), ("4", "r2"), ("3", "r3")):
        brew_and_pour(tmp_path, minutes=minutes, run=run)
    assert {int(version.version) for version in client.search_model_versions("name = 'tea'")} == {1, 2}
    assert registry.aliases(client, "tea") == {"candidate": 2}


def test_attempts_at_once_leave_one_version(tmp_path: Path, client: Any) -> None:
    store = Store.open(str(tmp_path / "store"))
    register(store, perplexity=50.0)  # so that all of them begin with the version, not with the model
    barrier = Barrier(3)

    def attempt(_: int) -> int:
        barrier.wait()
        return register(store, perplexity=40.0).number

    with ThreadPoolExecutor(3) as pool:
        numbers = set(pool.map(attempt, range(3)))
    left = {int(version.version) for version in client.search_model_versions(f"name = '{MODEL}'")} - {1}
    assert numbers == left
    assert len(left) == 1
    assert registry.aliases(client, MODEL) == {"candidate": max(left)}


def test_an_alias_that_another_attempt_writes_between_mlflows_reading_and_writing(tmp_path: Path, client: Any) -> None:
    written: list[int] = []

    def other_attempt(session: Session, *_: object) -> None:
        if written or not any(isinstance(row, SqlRegisteredModelAlias) for row in session.new):
            return
        with closing(sqlite3.connect(os.environ["MLFLOW_TRACKING_URI"].removeprefix("sqlite:///"))) as database:
            made = database.execute(
                "INSERT INTO registered_model_aliases (workspace, name, alias, version)"
                " SELECT workspace, name, 'candidate', version FROM model_versions"
            )
            database.commit()
            written.append(made.rowcount)

    event.listen(Session, "before_flush", other_attempt)
    try:
        register(Store.open(str(tmp_path / "store")), perplexity=50.0)
    finally:
        event.remove(Session, "before_flush", other_attempt)
    assert written == [1]
    assert registry.aliases(client, MODEL) == {"candidate": 1}


@pytest.mark.parametrize(
    ("tracking", "store", "message"),
    [
        ("", "/data", "needs MLflow"),
        ("http://mlflow:5000", "/data", "an MLflow server registers what lies in S3, not in /data"),
    ],
)
def test_what_cannot_be_registered_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracking: str, store: str, message: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking)
    at = Store.open(f"{tmp_path}{store}")
    with pytest.raises(ValueError, match=message.replace("/data", f"{at.uri}")):
        registry.require_possible("student", at)
    registry.require_possible("", at)


@pytest.mark.parametrize("uri", ["models:/nobody@champion", "models:/nobody/1", "models:/nobody@", "models:/a/b/c"])
def test_a_version_that_is_not_there(client: Any, uri: str) -> None:
    with pytest.raises(ValueError, match=r"no such version|write models:/NAME@champion"):
        registry.resolve(client, uri)


def test_a_version_of_somebody_else(client: Any) -> None:
    client.create_registered_model("other")
    client.create_model_version("other", source="s3://elsewhere/model")
    client.set_registered_model_alias("other", "champion", "1")
    with pytest.raises(ValueError, match="was not registered by reflux"):
        registry.resolve(client, "models:/other@champion")
    assert list(registry.named(client)) == []
