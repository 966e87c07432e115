"""The task after all others: MLflow says of a pipeline run how it ended, whatever Kubeflow calls that."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp import dsl
from servers import kfp_plugin
from servers.kfp_plugin import JOB
from toy_stages.brew.component import brew
from toy_stages.brew.config import BrewConfig

from reflux.components import __main__ as entry
from reflux.components import tracking
from reflux.components.kubeflow.close_run import close_run
from reflux.components.storage import Store
from reflux.pipelines import ir_lint
from reflux.pipelines.compile import compile_to_text


@pytest.fixture(scope="module")
def database(empty_mlflow: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{shutil.copy(empty_mlflow, tmp_path_factory.mktemp('mlflow'))}"


@pytest.fixture
def client(database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME", "REFLUX_PARENT_PID"):
        monkeypatch.delenv(name, raising=False)
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=database)
    yield client
    for run in client.search_runs([each.experiment_id for each in client.search_experiments()]):
        client.delete_run(run.info.run_id)


def close(root: Path, state: str) -> int:
    """As KFP's launcher starts it: it writes no output, and its status is a struct."""
    status = {"state": state, "pipelineTaskName": "exit-handler-1", "pipelineJobResourceName": "reflux-x", "error": {}}
    parameters = {"run": "", "job": JOB} | ({"status": status} if state else {})
    asked = {"inputs": {"parameterValues": parameters}, "outputs": {"outputFile": str(root / "output.json")}}
    return entry.main(["close_run", "--executor-input", json.dumps(asked)])


def stages_that_ended(root: Path, client: Any, *statuses: str) -> str:
    """The parent's id. RUNNING is a stage that was killed and could not say so."""
    store = Store.open(str(root / "store"))
    parent = tracking.begin_pipeline(JOB, {}, store=store, job=JOB)
    assert parent is not None
    for n, status in enumerate(statuses):
        at = {"store": store, "job": JOB, "params": {}, "parents": {}, "sources": {}}
        with tracking.stage_run(f"stage{n}", JOB, key=str(n), **at) as stage:
            assert stage is not None
        client.update_run(stage.run_id, status=status)
    return parent


def statuses(client: Any, parent: str) -> tuple[str, set[str]]:
    experiment = client.get_run(parent).info.experiment_id
    nested = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent}'")
    return client.get_run(parent).info.status, {run.info.status for run in nested}


@pytest.mark.parametrize(
    ("state", "stages", "closed"),
    [
        ("FAILED", ["FINISHED", "FAILED"], ("FAILED", {"FINISHED", "FAILED"})),
        ("FAILED", ["FINISHED", "RUNNING"], ("FAILED", {"FINISHED", "FAILED"})),  # out of memory
        ("FAILED", ["FINISHED", "KILLED"], ("KILLED", {"FINISHED", "KILLED"})),  # terminated in the UI
        ("CANCELED", ["RUNNING"], ("KILLED", {"KILLED"})),
        ("RUNNING", ["FINISHED", "FAILED"], ("FAILED", {"FINISHED", "FAILED"})),  # a loop that is over
        ("", ["FAILED", "KILLED"], ("FAILED", {"FAILED", "KILLED"})),
        ("COMPLETE", ["FINISHED"], ("FINISHED", {"FINISHED"})),
        ("SUCCEEDED", ["FINISHED"], ("FINISHED", {"FINISHED"})),
    ],
)
def test_how_it_ended(tmp_path: Path, client: Any, state: str, stages: list[str], closed: tuple[str, set[str]]) -> None:
    parent = stages_that_ended(tmp_path, client, *stages)
    assert close(tmp_path, state) == 0
    assert statuses(client, parent) == closed
    assert close(tmp_path, state) == 0  # the exit task is retried as any other
    assert statuses(client, parent) == closed


@pytest.mark.parametrize("verdict", ["pass", "fail"])
def test_a_run_that_came_to_its_end_keeps_what_the_last_stage_said(tmp_path: Path, client: Any, verdict: str) -> None:
    parent = stages_that_ended(tmp_path, client, "FINISHED")
    tracking.end_pipeline(JOB, status="FINISHED", job=JOB, verdict=verdict, root="sha256:ab")
    assert close(tmp_path, "RUNNING") == 0
    assert statuses(client, parent)[0] == "FINISHED"
    assert client.get_run(parent).data.tags["reflux.verdict"] == verdict


def test_the_plugins_parent_is_closed_and_its_own_runs_left_alone(tmp_path: Path, client: Any) -> None:
    parent = kfp_plugin.api_server_creates_the_run(client)
    mine = kfp_plugin.driver_starts_a_task(client, parent, "close-run")
    assert close(tmp_path, "FAILED") == 0
    assert client.get_run(parent.info.run_id).info.status == "FAILED"
    assert client.get_run(mine.info.run_id).info.status == "RUNNING"  # until KFP's launcher ends it


def test_a_run_that_failed_before_mlflow_knew_it(
    tmp_path: Path, client: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert close(tmp_path, "FAILED") == 0
    assert "there is nothing to close" in capsys.readouterr().out


def test_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert close(tmp_path, "FAILED") == 0
    assert "tracking: off" in capsys.readouterr().out


def test_loops_and_orders_are_inside_what_it_waits_for() -> None:
    @dsl.pipeline(name="party")
    def party():  # type: ignore[no-untyped-def]  # kfp cannot read annotations that are text, as they are here
        job = dsl.PIPELINE_JOB_ID_PLACEHOLDER
        at = {"store": "s3://bucket/reflux", "run": "r1", "job": job, "overrides": {}}
        with dsl.ExitHandler(close_run(run="r1", job=job)):
            first = brew(BrewConfig(), **at)
            with dsl.ParallelFor([1, 2]) as minutes:
                brew(BrewConfig(), minutes=minutes, **at).after(first)

    spec = next(yaml.safe_load_all(compile_to_text(party)))
    assert spec["root"]["dag"]["tasks"]["close-run"]["dependentTasks"] == ["exit-handler-1"]
    inside = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    (loop,) = set(inside) - {"brew"}
    assert inside[loop]["dependentTasks"] == ["brew"]
    assert [str(finding) for finding in ir_lint.lint(compile_to_text(party))] == []
