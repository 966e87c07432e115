"""`reflux run` as people start it: real processes, killed in the middle, continued by the same command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import small_run

from reflux.components.storage import S3Settings, Store
from reflux.pipelines import recipes, runs
from reflux.pipelines.store import embedded_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A working directory with a model and prompts, under a path that has been trouble elsewhere."""
    folder = tmp_path_factory.mktemp("lib") / "python3 with space"
    folder.mkdir()
    (folder / "model").symlink_to(tiny_model)
    small_run.write(folder)
    return folder


def command(*more: str) -> list[str]:
    sources = ["--teacher", "model", "--student", "model", "--prompts", "prompts.jsonl", "--labels", "labels.csv"]
    arguments = ["run", "--recipe", "demo", *sources, "--config", "small.json", *more]
    return [sys.executable, "-m", "reflux.pipelines", *arguments]


def environment() -> dict[str, str]:
    """Without an activated environment: no venv on PATH, no tracking server of somebody else's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "AWS_", "VIRTUAL_"))}
    return {**kept, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}


def run(project: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*more), cwd=project, env=environment(), capture_output=True, text=True)


def killed_when(project: Path, reached: Callable[[set[str]], bool], *more: str) -> None:
    """Start the command and kill -9 its whole process group as soon as the store's objects say that it is time."""
    with (project / "killed.log").open("w") as log:
        process = subprocess.Popen(
            command(*more), cwd=project, env=environment(), stdout=log, stderr=log, start_new_session=True
        )
    store: Store | None = None
    try:
        while process.poll() is None:
            server = embedded_store.serving(project / "reflux-data" / "store")
            if server is not None and store is None:
                settings = S3Settings.of_store(server.environment())
                store = Store.open(f"s3://{embedded_store.BUCKET}", settings)
            if store is not None and _reached(store, reached):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return
            time.sleep(0.02)
        pytest.fail(f"it ended before it could be killed:\n{(project / 'killed.log').read_text()}")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _reached(store: Store, reached: Callable[[set[str]], bool]) -> bool:
    try:
        return reached(set(store.list("objects")))
    except OSError:  # the server is not ready yet
        return False


def in_the_middle_of_collect(objects: set[str]) -> bool:
    pending = [name for name in objects if name.startswith("objects/collect_traces/") and "/pending/traces/" in name]
    return 2 <= len(pending) < small_run.PROMPTS // 4 - 2


def in_the_middle_of_distill(objects: set[str]) -> bool:
    return any(name.startswith("objects/distill/") and "/checkpoints/" in name for name in objects)


def last_lines(result: subprocess.CompletedProcess[str], project: Path) -> tuple[str, Path]:
    """The root digest and RUN, from where scripts read them."""
    *_, root, path = result.stdout.splitlines()
    assert root.startswith("root: sha256:")
    assert path.startswith("run: ")
    return root.removeprefix("root: "), project / path.removeprefix("run: ")


@pytest.fixture(scope="module")
def undisturbed(project: Path) -> tuple[str, Path]:
    """A run that nothing interrupts, in a plain directory."""
    result = run(project, "--store", "plain store", "--name", "undisturbed")
    assert result.returncode == 0, result.stdout + result.stderr
    return last_lines(result, project)


def test_a_run_leaves_everything_where_it_says(project: Path, undisturbed: tuple[str, Path]) -> None:
    root, folder = undisturbed
    assert folder == project / "reflux-data" / "runs" / "undisturbed"
    record = runs.read(folder)
    assert (record.root, record.verdict, record.status) == (root, "pass", "finished")
    assert set(record.artifacts) == set(recipes.STAGES)
    assert 'href="profile.html"' in (folder / "report.html").read_text()
    assert "<svg" in (folder / "profile.html").read_text()
    for target in (folder, folder / "bundle"):
        done = subprocess.run(
            [sys.executable, "-m", "reflux.pipelines", "lineage", str(target)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    report = [sys.executable, "-m", "reflux.pipelines", "report", str(folder), "--json"]
    table = json.loads(subprocess.run(report, capture_output=True, text=True, check=True).stdout)["table"]
    schemes = {"fp32", "w4a16_rtn", "w4a4_plain", "w4a4_dual", "w4a4_distilled"}
    assert schemes <= {row["scheme"] for row in table}


def test_a_failed_gate_fails_the_command_after_everything_is_written(
    project: Path, undisturbed: tuple[str, Path]
) -> None:
    result = run(project, "--store", "plain store", "--name", "strict", "--set", "evaluate.min_pmr=1.0")
    assert result.returncode == 3, result.stdout + result.stderr
    root, folder = last_lines(result, project)
    assert root != undisturbed[0]
    assert runs.read(folder).verdict == "fail"
    assert (folder / "bundle" / "manifest.json").is_file()
    assert result.stdout.count("reused") >= 5, "only evaluate has another configuration"


def test_what_was_wrong_is_not_to_be_repeated(project: Path, undisturbed: tuple[str, Path]) -> None:
    """Steps that the answers turn out not to have: no advice to start the same command again, and no trace of one."""
    (project / "late.csv").write_text("prompt_id,step,annotator,rating\np1,23,ann,3\n")
    result = run(project, "--store", "plain store", "--name", "late", "--labels", "late.csv")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "Error: stage ingest_labels: labels late.csv: no usable row; all 1 were rejected" in result.stderr
    assert "the same command goes on" not in result.stderr
    assert runs.read(project / "reflux-data" / "runs" / "late").status == "failed"


@pytest.mark.skipif(embedded_store.binary() is None, reason=embedded_store.why_no_binary())
def test_killed_twice_it_ends_with_the_same_digests(project: Path, undisturbed: tuple[str, Path]) -> None:
    killed_when(project, in_the_middle_of_collect)
    assert embedded_store.serving(project / "reflux-data" / "store") is not None, "the kill left the server running"
    killed_when(project, in_the_middle_of_distill)
    result = run(project)
    assert result.returncode == 0, result.stdout + result.stderr
    root, folder = last_lines(result, project)
    assert f"run {folder.name} continues" in result.stdout
    assert len(list(folder.parent.glob("demo-*"))) == 1, "the same command continued the same run"
    record, reference = runs.read(folder), runs.read(undisturbed[1])
    digests = {stage: artifact["digest"] for stage, artifact in record.artifacts.items()}
    assert digests == {stage: artifact["digest"] for stage, artifact in reference.artifacts.items()}
    assert root == undisturbed[0]
    assert embedded_store.serving(project / "reflux-data" / "store") is None, "the last command stopped the server"
    done = subprocess.run(
        [sys.executable, "-m", "reflux.pipelines", "lineage", str(folder), "--expect", root],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert embedded_store.serving(project / "reflux-data" / "store") is None
    _assert_one_tracked_run(project, folder.name)


def _assert_one_tracked_run(project: Path, name: str) -> None:
    """One parent and six nested runs, however often the command was started."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{project / 'reflux-data' / 'mlflow.db'}")
    (experiment,) = [e for e in client.search_experiments() if e.name == "reflux"]
    found = client.search_runs([experiment.experiment_id], filter_string=f"tags.`reflux.run` = '{name}'")
    (parent,) = [each for each in found if "mlflow.parentRunId" not in each.data.tags]
    nested = [each for each in found if each.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert sorted(each.data.tags["reflux.stage"] for each in nested) == sorted(recipes.STAGES)
    assert {each.info.status for each in found} == {"FINISHED"}
