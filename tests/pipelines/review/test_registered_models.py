"""What the registry's aliases name is kept by gc and found by lineage; without an answer from MLflow, nothing goes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import finished_run
import pytest
from click.testing import CliRunner, Result
from registered_bundles import MODEL, register

from reflux.components.storage import Store
from reflux.pipelines import runs
from reflux.pipelines.__main__ import cli
from reflux.pipelines.review import registered_models


@pytest.fixture(scope="module")
def database(empty_mlflow: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's database where `reflux run` has it by default."""
    return Path(shutil.copy(empty_mlflow, tmp_path_factory.mktemp("mlflow")))


@pytest.fixture
def client(database: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    uri = f"sqlite:///{database}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    yield client
    for model in client.search_registered_models():
        client.delete_registered_model(model.name)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run, whose store also holds what the tests register."""
    return finished_run.make(tmp_path)


def gc(run: Path, *more: str) -> Result:
    arguments = ["--store", runs.read(run).store.uri, "--data-dir", str(run.parents[1]), "--grace-hours", "0"]
    return CliRunner().invoke(cli, ["store", "gc", *arguments, *more])


def lineage(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["lineage", *arguments])


def test_gc_keeps_what_aliases_name_and_what_that_was_made_from(run: Path, client: Any) -> None:
    store = Store.open(runs.read(run).store.uri)
    elsewhere = Store.open(str(run.parent / "another-store"))
    versions = [register(store, perplexity=perplexity) for perplexity in (43.0, 42.0, 41.0, 40.0)]
    other = register(elsewhere, perplexity=39.0)
    for alias, version in {"champion": versions[1], "previous": versions[0], "candidate": other}.items():
        client.set_registered_model_alias(MODEL, alias, str(version.number))
    rows = json.loads(gc(run, "--json").output)
    goes = {(row["stage"], row["key"]) for row in rows if "manifest.json" in row["goes"]}
    assert goes == {place for v in versions[2:] for place in ((v.stage, v.key), (v.root_stage, v.root_key))}
    done = gc(run, "--delete")
    assert done.exit_code == 0, done.output
    for alias in ("champion", "previous"):
        assert lineage(f"models:/{MODEL}@{alias}").exit_code == 0
    assert "does not exist" not in done.output


def test_gc_removes_nothing_while_mlflow_does_not_answer(
    run: Path, monkeypatch: pytest.MonkeyPatch, client: Any
) -> None:
    store = Store.open(runs.read(run).store.uri)
    register(store, perplexity=40.0)
    before = store.list()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    result = gc(run, "--delete")
    assert result.exit_code == 2
    assert "MLFLOW_TRACKING_URI http://127.0.0.1:9: MLflow cannot be used" in result.output
    assert store.list() == before


def test_the_database_of_this_machine_is_asked_without_being_named(
    run: Path, client: Any, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(runs.read(run).store.uri)
    kept = register(store, perplexity=40.0)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # switched off: aliases are not asked for
    assert registered_models.kept(store, database.parent) == {}
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert registered_models.kept(store, run.parents[1]) == {}  # no run has used MLflow there
    assert registered_models.kept(store, database.parent) == {
        f"models:/{MODEL}@candidate": [("calibrate", kept.key), ("evaluate", kept.root_key)]
    }
    monkeypatch.delenv("MLFLOW_TRACKING_URI")


def test_lineage_of_a_registered_version(run: Path, client: Any) -> None:
    store = Store.open(runs.read(run).store.uri)
    version = register(store, perplexity=40.0)
    result = lineage(f"models:/{MODEL}@candidate", "--json")
    assert result.exit_code == 0, result.output
    chain = json.loads(result.stdout)
    assert (chain["verified"], chain["root"]) == (True, version.digest)
    assert [node["stage"] for node in chain["artifacts"]] == ["calibrate", "collect_traces"]

    client.set_model_version_tag(MODEL, "1", "reflux.digest", f"sha256:{'0' * 64}")  # somebody edits the registry
    changed = lineage(f"models:/{MODEL}/1")
    assert changed.exit_code == 1
    assert f"models:/{MODEL}/1 recorded sha256:0000" in changed.output
    missing = lineage(f"models:/{MODEL}@champion")
    assert (missing.exit_code, "no such version" in missing.output) == (2, True)


def test_where_attempts_agreed_on_runs_is_old_news_for_gc(run: Path, client: Any) -> None:
    store = Store.open(runs.read(run).store.uri)
    register(store, perplexity=40.0)
    assert store.list("tracking")
    promotions = "promotions/student/000001.json"
    store.write(promotions, b"{}")
    assert gc(run, "--delete").exit_code == 0
    assert store.list("tracking") == []
    assert store.list("promotions") == [promotions]
