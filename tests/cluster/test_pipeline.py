"""The demo pipeline in containers over S3, disturbed on the way, against the same pipeline left alone.

Everything around it is real: SeaweedFS behind a proxy that can cut it off, an MLflow server with PostgreSQL, an engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import small_run
from docker import DockerClient
from docker.models.containers import Container
from mlflow import MlflowClient
from servers import fault_proxy, mlflow_server, seaweed

from reflux.components.storage import S3Settings, Store
from reflux.pipelines import recipes, runs
from reflux.pipelines.machine import container_engine

pytestmark = pytest.mark.timeout(600)

SOURCES = f"s3://{seaweed.BUCKET}/sources"
AWAY_S = 10.0
TEXT = "The still is heated, what evaporates rises, and a part of what condenses flows back. " * 40


@dataclass(frozen=True, kw_only=True)
class Around:
    """What a run finds outside itself."""

    folder: Path
    s3: S3Settings
    proxy: fault_proxy.Proxy

    def store(self, name: str) -> Store:
        """One of the stores, past the proxy."""
        return Store.open(uri(name), self.s3)

    def environment(self, settings: S3Settings, tracking: str) -> dict[str, str]:
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "MLFLOW_", "REFLUX_"))
        }
        own = {"OMP_NUM_THREADS": "1", "REFLUX_CACHE": str(self.folder / "cache"), "HF_HUB_OFFLINE": "1"}
        return {**kept, **settings.env(), **own, **({"MLFLOW_TRACKING_URI": tracking} if tracking else {})}


def uri(name: str) -> str:
    return f"s3://{seaweed.BUCKET}/{name}"


def command(store: str, *more: str) -> list[str]:
    models = ["--teacher", f"{SOURCES}/model", "--student", f"{SOURCES}/model"]
    data = [
        "--prompts",
        f"{SOURCES}/prompts.jsonl",
        "--labels",
        f"{SOURCES}/labels.csv",
        "--eval-text",
        f"{SOURCES}/text",
    ]
    run = ["run", "--recipe", "demo", "--config", "small.json", "--store", uri(store), "--name", store]
    return [sys.executable, "-m", "reflux.pipelines", *run, *models, *data, *more]


@pytest.fixture(scope="module")
def around(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Around]:
    """The services, and in the store a tiny model, prompts, labels and a text."""
    folder = tmp_path_factory.mktemp("around")
    with seaweed.running(folder / "s3") as s3, fault_proxy.in_front_of(s3, patience_s=60) as proxy:
        small_run.write(folder)
        store = Store.open(SOURCES, s3)
        for path in tiny_model.iterdir():
            store.upload(f"model/{path.name}", path)
        for name in ("prompts.jsonl", "labels.csv"):
            store.upload(name, folder / name)
        store.write("text", TEXT.encode())
        yield Around(folder=folder, s3=s3, proxy=proxy)


@pytest.fixture(scope="module")
def left_alone(around: Around, image_build: object) -> Iterator[subprocess.Popen[bytes]]:
    """A run to which nothing happens, in processes of this machine, while the image is made."""
    with started(around, "undisturbed", around.environment(around.s3, "")) as process:
        yield process


@pytest.fixture(scope="module")
def tracking(around: Around) -> Iterator[str]:
    with mlflow_server.running(around.s3, uri("mlflow")) as address:
        yield address


@pytest.fixture(scope="module")
def undisturbed(around: Around, left_alone: subprocess.Popen[bytes]) -> runs.RunRecord:
    assert left_alone.wait() == 0, (around.folder / "undisturbed.log").read_text()
    return runs.read(around.folder / "reflux-data" / "runs" / "undisturbed")


@pytest.fixture(scope="module")
def disturbed(
    around: Around, left_alone: subprocess.Popen[bytes], tracking: str, engine: DockerClient, image: str
) -> str:
    """What a run in containers printed, one of which was killed, and whose store was away for a while."""
    more = ["--runner", "docker", "--image", image]
    environment = around.environment(around.proxy.settings, tracking)
    with started(around, "disturbed", environment, *more) as process:
        store = around.store("disturbed")
        wait_until(lambda: _pending_traces(store) >= 2, process)
        (container,) = stages(engine, "collect_traces")
        container.kill()
        wait_until(lambda: any("/checkpoints/" in key for key in store.list("objects/distill")), process)
        around.proxy.go_away(AWAY_S)
        code = process.wait(timeout=400)
    output = (around.folder / "disturbed.log").read_text()
    assert code == 0, output
    assert stages(engine, "") == []
    return output


@contextmanager
def started(around: Around, name: str, environment: dict[str, str], *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """The command of a run with its own store, its output going to NAME.log; ended with the block."""
    with (around.folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command(name, *more), cwd=around.folder, env=environment, stdout=log, stderr=log)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    while not condition():
        assert process.poll() is None, "it ended before it could be disturbed"
        time.sleep(0.05)


def _pending_traces(store: Store) -> int:
    return sum("/pending/traces/" in key for key in store.list("objects/collect_traces"))


def stages(engine: DockerClient, stage: str) -> list[Container]:
    label = f"{container_engine.STAGE_LABEL}={stage}" if stage else container_engine.STAGE_LABEL
    return engine.containers.list(all=True, filters={"label": label})


def test_the_killed_stage_went_on_and_the_absent_store_cost_nothing(
    around: Around, disturbed: str, undisturbed: runs.RunRecord
) -> None:
    assert "killed by SIGKILL" in disturbed
    assert disturbed.count("starting it again, 1 of 1") == 1
    assert around.proxy.away_until > 0
    record = runs.read(around.folder / "reflux-data" / "runs" / "disturbed")
    assert record.status == "finished"
    digests = {stage: artifact["digest"] for stage, artifact in record.artifacts.items()}
    assert digests == {stage: artifact["digest"] for stage, artifact in undisturbed.artifacts.items()}
    assert record.root == undisturbed.root


def test_lineage_needs_the_store_alone(
    around: Around, disturbed: str, undisturbed: runs.RunRecord, tmp_path: Path
) -> None:
    arguments = ["lineage", undisturbed.root, "--store", uri("disturbed"), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "reflux.pipelines", *arguments], cwd=tmp_path, env=around.environment(around.s3, ""),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    chain = json.loads(done.stdout)
    assert chain["verified"]
    assert {node["stage"] for node in chain["artifacts"]} == set(recipes.STAGES)
    sources = {source["uri"] for node in chain["artifacts"] for source in node["sources"].values()}
    assert sources == {f"{SOURCES}/{name}" for name in ("model", "prompts.jsonl", "labels.csv", "text")}


def test_mlflow_shows_one_parent_and_six_stages(tracking: str, disturbed: str) -> None:
    client = MlflowClient(tracking)
    (experiment,) = [e for e in client.search_experiments() if e.name == "reflux"]
    found = client.search_runs([experiment.experiment_id])
    (parent,) = [each for each in found if "mlflow.parentRunId" not in each.data.tags]
    nested = [each for each in found if each.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert len(found) == 7
    assert sorted(each.data.tags["reflux.stage"] for each in nested) == sorted(recipes.STAGES)
    assert {each.info.status for each in found} == {"FINISHED"}
    assert [item.path for item in client.list_artifacts(parent.info.run_id)] == ["report.html"]
    (distill,) = [each for each in nested if each.data.tags["reflux.stage"] == "distill"]
    for name in distill.data.metrics:
        steps = [point.step for point in client.get_metric_history(distill.info.run_id, name)]
        assert len(steps) == len(set(steps)), f"{name} has a point twice"
