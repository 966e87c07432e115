"""Attempts at one stage in processes of their own: killed, terminated, and two at once, over one MLflow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

pytestmark = pytest.mark.slow  # every process takes seconds to import MLflow


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME", "REFLUX_PARENT_PID"):
        monkeypatch.delenv(name, raising=False)
    client = MlflowClient(tracking_uri=uri)
    client.search_experiments()  # so that the processes do not all make the tables
    return client


def start(root: Path, *more: str) -> subprocess.Popen[str]:
    (root / "leaves.txt").write_text("assam")
    flags = ["--store", str(root / "store"), "--run", "r1", "--leaves", str(root / "leaves.txt")]
    return subprocess.Popen(
        [sys.executable, "-m", "reflux.components", "toy_stages.brew", *flags, "--out-tea", str(root / "tea"), *more],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def runs(client: MlflowClient) -> list[Any]:
    """Those of the one pipeline run, its parent first."""
    experiments = [each.experiment_id for each in client.search_experiments()]
    return list(client.search_runs(experiments, order_by=["attributes.start_time ASC"]))


def points(client: MlflowClient, run: Any) -> list[tuple[int, int, float]]:
    return sorted((m.step, m.timestamp, m.value) for m in client.get_metric_history(run.info.run_id, "warmth"))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_run_of_a_killed_attempt_is_taken_over(tmp_path: Path, client: MlflowClient) -> None:
    """Killed at once, as for want of memory; then terminated, as Kubernetes ends a pod; then left alone."""
    killed = start(tmp_path, "--fault", "kill", "--steps", "3")
    assert killed.wait(200) == -signal.SIGKILL
    assert [run.info.status for run in runs(client)] == ["RUNNING", "RUNNING"]
    terminated = start(tmp_path, "--fault", "sleep", "--steps", "4")
    wait_until(lambda: len(points(client, runs(client)[1])) == 4)
    terminated.send_signal(signal.SIGTERM)
    assert terminated.wait(200) == 128 + signal.SIGTERM
    assert runs(client)[1].info.status == "KILLED"
    again = start(tmp_path)
    assert again.wait(200) == 0, again.communicate()[0]
    parent, stage = runs(client)
    assert stage.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert stage.info.status == "FINISHED"
    *steps, (step, _, value) = points(client, stage)
    assert steps == [(step, 1000 * step, 0.5) for step in (1, 2, 3, 4)]
    assert (step, value) == (4, 0.9)


def test_two_attempts_at_once_look_like_one(tmp_path: Path, client: MlflowClient) -> None:
    for each in [start(tmp_path), start(tmp_path)]:
        assert each.wait(200) == 0, each.communicate()[0]
    parent, stage = runs(client)
    assert (parent.info.run_name, stage.info.run_name) == ("r1", "brew")
    assert stage.info.status == "FINISHED"
    *steps, (_, _, value) = points(client, stage)
    assert steps == [(step, 1000 * step, 0.5) for step in (1, 2, 3, 4)]
    assert value == 0.9
    assert stage.data.tags["reflux.digest"].startswith("sha256:")
