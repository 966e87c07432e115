"""One tree of MLflow runs, whether Kubeflow's plugin is off, on, or on with its variables in the container."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from servers import kfp_plugin
from servers.kfp_plugin import JOB

from reflux.components import __main__ as entry
from reflux.components import run_tree, tracking
from reflux.components.storage import Store

PARAMETERS = {"run": "", "job": JOB, "overrides": {}, "minutes": 5.0, "note": "green", "fault": "", "steps": 4.0}
FINAL = {"warmth": 0.9, "cups": 2.0}


@pytest.fixture(scope="module")
def database(empty_mlflow: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{shutil.copy(empty_mlflow, tmp_path_factory.mktemp('mlflow'))}"


@pytest.fixture
def client(database: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """MLflow, in which every test finds only its own runs."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME", "REFLUX_PARENT_PID"):
        monkeypatch.delenv(name, raising=False)
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=database)
    yield client
    for run in everything(client):
        client.delete_run(run.info.run_id)


def everything(client: Any) -> list[Any]:
    experiments = [each.experiment_id for each in client.search_experiments()]
    return list(client.search_runs(experiments, order_by=["attributes.start_time ASC"]))


def brew(root: Path, *, job: str = JOB, **changed: Any) -> tuple[int, dict[str, Any]]:
    """The task as KFP's launcher starts it; its exit code, and its parameters."""
    (root / "leaves.txt").write_text("assam")
    parameters = {**PARAMETERS, "job": job, "store": str(root / "store"), "leaves": str(root / "leaves.txt"), **changed}
    asked = {
        "inputs": {"parameterValues": parameters},
        "outputs": {
            "outputFile": str(root / "output.json"),
            "artifacts": {"tea": {"artifacts": [{"name": "tea", "uri": str(root / "tea"), "metadata": {}}]}},
        },
    }
    return entry.main(["toy_stages.brew", "--executor-input", json.dumps(asked)]), parameters


def warmth(client: Any, run: Any) -> list[tuple[int, float]]:
    return sorted((point.step, point.value) for point in client.get_metric_history(run.info.run_id, "warmth"))


def test_without_the_plugin_both_runs_are_ours_and_know_the_pipelines(tmp_path: Path, client: Any) -> None:
    assert brew(tmp_path, fault="value")[0] == 2
    assert brew(tmp_path)[0] == 0
    parent, stage = everything(client)
    assert (parent.info.run_name, stage.info.run_name) == (JOB, "brew")
    assert stage.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert {run.data.tags["kfp.pipeline_run_id"] for run in (parent, stage)} == {JOB}
    assert stage.data.params["note"] == "green"
    assert warmth(client, stage) == [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.5), (4, 0.9)]


def test_two_runs_of_a_cluster_with_one_name_have_a_tree_each(tmp_path: Path, client: Any) -> None:
    jobs = [JOB, "7d0c4a52-93b1-4f7e-8a06-5e2b1c9d3f80"]
    for job in jobs:
        assert brew(tmp_path, job=job, run="tea-party")[0] == 0
    assert [run_tree.find_parent(client, "1", "tea-party", job).data.tags[run_tree.JOB] for job in jobs] == jobs
    first, first_stage, second, second_stage = everything(client)
    assert first_stage.data.tags["mlflow.parentRunId"] == first.info.run_id
    assert second_stage.data.tags["mlflow.parentRunId"] == second.info.run_id


@pytest.mark.parametrize("injected", [False, True])
def test_with_the_plugin_its_runs_are_taken_and_filled(
    tmp_path: Path, client: Any, database: str, monkeypatch: pytest.MonkeyPatch, injected: bool
) -> None:
    """A first attempt fails, a second one succeeds; KFP's driver ran once, its launcher after each of them."""
    parent = kfp_plugin.api_server_creates_the_run(client)
    prepared = kfp_plugin.driver_starts_a_task(client, parent, "brew")
    other = kfp_plugin.driver_starts_a_task(client, parent, "brew-coffee")
    if injected:
        for name, value in kfp_plugin.environment(prepared, database).items():
            monkeypatch.setenv(name, value)

    code, parameters = brew(tmp_path, fault="value")
    assert code == 2
    kfp_plugin.launcher_ends_a_task(client, prepared, parameters, {}, "FAILED")
    code, _ = brew(tmp_path)
    assert code == 0
    shown = client.get_run(prepared.info.run_id)
    kfp_plugin.launcher_ends_a_task(client, prepared, parameters, FINAL, "FINISHED")

    assert [run.info.run_id for run in everything(client)] == [run.info.run_id for run in (parent, prepared, other)]
    assert client.get_run(parent.info.run_id).data.tags["reflux.run"] == JOB
    stage = client.get_run(prepared.info.run_id)
    assert (stage.info.status, stage.info.run_name) == ("FINISHED", "brew")
    assert stage.data.tags["reflux.digest"] == shown.data.tags["reflux.digest"]
    assert stage.data.params["note"] == '"green"'  # KFP's own words, which ours would have made it refuse
    assert warmth(client, stage) == [(0, 0.9), (1, 0.5), (2, 0.5), (3, 0.5), (4, 0.5)]
    assert [point.value for point in client.get_metric_history(stage.info.run_id, "cups")] == [2.0]
    assert len(stage.inputs.dataset_inputs) == 1


def test_tasks_of_one_name_in_a_loop_take_a_run_each(tmp_path: Path, client: Any) -> None:
    parent = kfp_plugin.api_server_creates_the_run(client)
    loop = kfp_plugin.driver_starts_a_task(client, parent, "for-loop-1")
    prepared = [kfp_plugin.driver_starts_a_task(client, loop, "brew") for _ in range(3)]
    for minutes in (1.0, 2.0, 3.0, 2.0):
        assert brew(tmp_path, minutes=minutes)[0] == 0
    found = [client.get_run(run.info.run_id) for run in prepared]
    assert len({run.data.tags["reflux.key"] for run in found}) == 3
    assert len(everything(client)) == 5


def test_a_run_id_that_is_not_the_plugins_is_left_alone(
    tmp_path: Path, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    somebodys = client.create_run(client.create_experiment("notebook"), run_name="notebook")
    monkeypatch.setenv("MLFLOW_RUN_ID", somebodys.info.run_id)
    assert brew(tmp_path)[0] == 0
    assert brew(tmp_path, job="12345678", run="local")[0] == 0
    assert client.get_run(somebodys.info.run_id).data.tags.keys() <= {"mlflow.runName"}
    monkeypatch.setenv("MLFLOW_RUN_ID", "0" * 32)  # that of a server which is not ours
    assert brew(tmp_path)[0] == 0
    assert sorted(run.info.run_name for run in everything(client)) == sorted(["notebook", JOB, "brew", "local", "brew"])


def test_attempts_at_once_use_one_run_each_for_the_pipeline_and_the_stage(tmp_path: Path, client: Any) -> None:
    store = Store.open(str(tmp_path / "store"))
    barrier = Barrier(4)

    def attempt(_: int) -> tuple[str, str]:
        barrier.wait()
        parent = run_tree.parent(client, lambda: tracking._experiment(client), store, "r1", "")
        nested = run_tree.nested(client, parent, store, stage="steep", run="r1", key="k", job="")
        return parent.info.run_id, nested.info.run_id

    with ThreadPoolExecutor(4) as pool:
        (ids,) = set(pool.map(attempt, range(4)))
    assert sorted(run.info.run_id for run in everything(client)) == sorted(ids)


def test_what_a_kill_between_making_and_agreeing_left_is_removed(tmp_path: Path, client: Any) -> None:
    """Of two runs with the same tags, the one that the attempts agreed on stays, though it is younger."""
    store = Store.open(str(tmp_path / "store"))
    experiment = tracking._experiment(client)
    parent = run_tree.parent(client, lambda: experiment, store, "r1", "")
    agreed = run_tree.nested(client, parent, store, stage="steep", run="r1", key="k", job="")
    left = client.create_run(experiment, run_name="steep", tags=agreed.data.tags, start_time=1)
    again = run_tree.nested(client, parent, store, stage="steep", run="r1", key="k", job="")
    assert again.info.run_id == agreed.info.run_id
    assert client.get_run(left.info.run_id).info.lifecycle_stage == "deleted"

    client.delete_run(agreed.info.run_id)  # by hand, in MLflow's pages: the stage gets a new one
    new = run_tree.nested(client, parent, store, stage="steep", run="r1", key="k", job="")
    assert new.info.run_id not in (agreed.info.run_id, left.info.run_id)
    assert client.get_run(new.info.run_id).info.lifecycle_stage == "active"
