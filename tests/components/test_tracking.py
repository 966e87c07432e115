"""MLflow on a real sqlite file: a run that is retried, killed or reused looks as if it had gone right at once."""

from __future__ import annotations

import math
import os
import shutil
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import pytest

from reflux.components import __main__ as entry
from reflux.components import mlflow_connection, tracking
from reflux.components.artifacts import Artifact
from reflux.components.progress import MetricPoint
from reflux.components.storage import Store


@pytest.fixture(scope="module")
def database(empty_mlflow: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database for the module, where each test has an experiment of its own."""
    return f"sqlite:///{shutil.copy(empty_mlflow, tmp_path_factory.mktemp('mlflow'))}"


@pytest.fixture
def client(database: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", request.node.name)
    monkeypatch.delenv("REFLUX_PARENT_PID", raising=False)
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=database)


def brew(root: Path, *more: str, run: str = "r1") -> int:
    leaves = root / "leaves.txt"
    leaves.write_text("assam")
    flags = ["--store", str(root / "store"), "--run", run, "--out-tea", str(root / "tea.json"), "--leaves", str(leaves)]
    return entry.main(["toy_stages.brew", *flags, *more])


def pour(root: Path, *more: str, run: str = "r1") -> int:
    flags = ["--store", str(root / "store"), "--run", run, "--tea", str(root / "tea.json")]
    return entry.main(["toy_stages.pour", *flags, "--out-cup", str(root / "cup.json"), *more])


def steeping(root: Path) -> AbstractContextManager[tracking.StageRun | None]:
    """A stage's run without a stage."""
    store = Store.open(str(root / "store"))
    return tracking.stage_run("steep", "r1", store=store, key="k", params={}, parents={}, sources={})


def runs(client: Any, request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    """Run name -> its runs in this test's experiment, the oldest first."""
    experiment = client.get_experiment_by_name(request.node.name)
    found: dict[str, list[Any]] = {}
    for run in client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"]):
        found.setdefault(run.info.run_name, []).append(run)
    return found


def history(client: Any, run: Any, metric: str) -> list[tuple[int, int, float]]:
    return [(m.step, m.timestamp, m.value) for m in client.get_metric_history(run.info.run_id, metric)]


def test_one_parent_and_one_nested_run_per_stage(tmp_path: Path, client: Any, request: pytest.FixtureRequest) -> None:
    teacher = {"recipe": "toy", "teacher": "s3://key:secret@bucket/teacher"}
    tracking.begin_pipeline("r1", teacher, store=Store.open(str(tmp_path / "store")))
    assert brew(tmp_path, "--minutes", "5") == 0
    assert pour(tmp_path) == 0
    page = tmp_path / "report.html"
    page.write_text("<p>all</p>")
    tracking.end_pipeline("r1", status="FINISHED", verdict="pass", root="sha256:ab", report=page)

    found = runs(client, request)
    assert {name: len(r) for name, r in found.items()} == {"r1": 1, "brew": 1, "pour": 1}
    (parent,), (stage,), (last,) = found["r1"], found["brew"], found["pour"]
    assert {stage.data.tags["mlflow.parentRunId"], last.data.tags["mlflow.parentRunId"]} == {parent.info.run_id}
    assert {run.info.status for run in (parent, stage, last)} == {"FINISHED"}
    assert parent.data.params == {"recipe": "toy", "teacher": "s3://bucket/teacher"}
    assert (parent.data.tags["reflux.verdict"], parent.data.tags["reflux.root"]) == ("pass", "sha256:ab")
    assert stage.data.params["minutes"] == "5"
    assert stage.data.tags["reflux.digest"].startswith("sha256:")
    assert "reused_from" not in stage.data.tags
    assert stage.data.metrics["cups"] == 2.0
    (tea,) = last.inputs.dataset_inputs
    assert tea.dataset.name == "tea"
    assert stage.data.tags["reflux.digest"] in {tag.value for tag in tea.tags}
    assert tea.dataset.digest in stage.data.tags["reflux.digest"]
    assert str(tmp_path / "store") in tea.dataset.source
    (leaves,) = stage.inputs.dataset_inputs
    assert leaves.dataset.name == "leaves"
    assert [file.path for file in client.list_artifacts(last.info.run_id)] == ["report.html"]
    assert [file.path for file in client.list_artifacts(parent.info.run_id)] == ["report.html"]
    assert "/mlartifacts/" in last.info.artifact_uri


@pytest.mark.parametrize(("sweet", "verdict"), [("true", "pass"), ("false", "fail")])
def test_the_last_stage_closes_the_run_that_no_command_began(
    tmp_path: Path, client: Any, request: pytest.FixtureRequest, sweet: str, verdict: str
) -> None:
    """As on a cluster; and what `reflux run` says afterwards on one machine is the same once more."""
    assert brew(tmp_path) == 0
    (begun,) = runs(client, request)["r1"]
    assert (begun.info.status, begun.data.tags.get("reflux.root")) == ("RUNNING", None)
    assert pour(tmp_path, "--sweet", sweet) == 0
    (parent,), (last,) = runs(client, request)["r1"], runs(client, request)["pour"]
    assert (parent.info.run_id, parent.info.status) == (begun.info.run_id, "FINISHED")
    assert (parent.data.tags["reflux.verdict"], parent.data.tags["reflux.root"]) == (
        verdict,
        last.data.tags["reflux.digest"],
    )
    tracking.end_pipeline("r1", status="FINISHED", verdict=verdict, root=last.data.tags["reflux.digest"])
    (again,) = runs(client, request)["r1"]
    assert (again.info.status, again.data.tags) == (parent.info.status, parent.data.tags)


def test_a_retry_continues_the_run_and_repeats_no_point(
    tmp_path: Path, client: Any, request: pytest.FixtureRequest
) -> None:
    assert brew(tmp_path, "--fault", "value", "--steps", "3") == 2
    (failed,) = runs(client, request)["brew"]
    assert failed.info.status == "FAILED"
    assert history(client, failed, "warmth") == [(1, 1000, 0.5), (2, 2000, 0.5), (3, 3000, 0.5)]

    assert brew(tmp_path, "--steps", "4") == 0  # a setting that changed, and points that are published again
    (done,) = runs(client, request)["brew"]
    assert (done.info.run_id, done.info.status) == (failed.info.run_id, "FINISHED")
    *steps, final = history(client, done, "warmth")
    assert steps == [(step, 1000 * step, 0.5) for step in (1, 2, 3, 4)]
    assert (final[0], final[2]) == (4, 0.9)
    nans = history(client, done, "loss_nats")
    assert len(nans) == 4
    assert all(math.isnan(value) for _, _, value in nans)
    assert done.data.params["steps"] == "3"
    assert done.data.tags["reflux.retried_with.steps"] == "4"

    assert brew(tmp_path, "--steps", "4") == 0  # the whole command once more: nothing is added
    (again,) = runs(client, request)["brew"]
    assert history(client, again, "warmth") == [*steps, final]
    assert len(again.inputs.dataset_inputs) == 1
    assert "reused_from" not in again.data.tags


def test_a_reused_stage_names_the_run_that_made_it(tmp_path: Path, client: Any, request: pytest.FixtureRequest) -> None:
    assert brew(tmp_path, run="r1") == 0
    assert brew(tmp_path, run="r2") == 0
    made, reused = runs(client, request)["brew"]
    assert reused.data.tags["reused_from"] == made.info.run_id
    assert reused.data.metrics["cups"] == 2.0
    assert reused.data.tags["reflux.run"] == "r2"
    assert len(runs(client, request)["r2"]) == 1  # no command line made the parent: the stage did


def test_points_wait_while_mlflow_is_away(
    tmp_path: Path, client: Any, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    with steeping(tmp_path) as run:
        assert run is not None
        working, run.client = run.client, None
        run.publish([MetricPoint(step=1, time_ms=1, values={"loss_nats": 2.0})])
        assert "tracking: 1 points wait" in capsys.readouterr().out
        run.client = working
        run.publish([MetricPoint(step=2, time_ms=2, values={"loss_nats": 1.0})])
    (steep,) = runs(client, request)["steep"]
    assert history(client, steep, "loss_nats") == [(1, 1, 2.0), (2, 2, 1.0)]


def test_the_last_attempt_to_begin_is_the_one_that_logs(
    tmp_path: Path, client: Any, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when a node is cut off: its pod works on while another one has been started for the same task."""
    checkpointed = [MetricPoint(step=1, time_ms=1, values={"loss_nats": 2.0})]
    with suppress(RuntimeError), steeping(tmp_path) as cut_off:
        assert cut_off is not None
        cut_off.publish(checkpointed)
        with steeping(tmp_path) as present:
            assert present is not None
            present.publish(checkpointed)
            cut_off.publish([MetricPoint(step=2, time_ms=20, values={"loss_nats": 1.0})])
            present.publish([MetricPoint(step=2, time_ms=21, values={"loss_nats": 1.0})])
        raise RuntimeError("the node came back")
    (steep,) = runs(client, request)["steep"]
    assert history(client, steep, "loss_nats") == [(1, 1, 2.0), (2, 21, 1.0)]
    assert steep.info.status == "FINISHED"
    assert capsys.readouterr().out.count("another attempt at this stage has begun") == 1


def test_what_a_cut_off_attempt_made_is_shown_as_a_whole_if_the_next_one_finds_it(
    tmp_path: Path, client: Any, request: pytest.FixtureRequest
) -> None:
    assert brew(tmp_path) == 0
    tea = Artifact.load(Store.open(str(tmp_path / "store")), (tmp_path / "tea.json").read_bytes())
    points = [MetricPoint(step=s, time_ms=s, values={"loss_nats": 1.0 / s}) for s in (1, 2)]
    with steeping(tmp_path) as cut_off, steeping(tmp_path) as present:
        assert cut_off is not None
        assert present is not None
        cut_off.publish(points)
        assert "loss_nats" not in client.get_run(cut_off.run_id).data.metrics
        cut_off.finish(tea, reused=False, pages={})
        present.finish(tea, reused=True, pages={})
    (steep,) = runs(client, request)["steep"]
    assert history(client, steep, "loss_nats") == [(1, 1, 1.0), (2, 2, 0.5)]
    assert [(step, value) for step, _, value in history(client, steep, "cups")] == [(2, 2.0)]


def test_interrupted_by_hand_is_killed_not_failed(tmp_path: Path, client: Any, request: pytest.FixtureRequest) -> None:
    with pytest.raises(KeyboardInterrupt), steeping(tmp_path):
        raise KeyboardInterrupt
    (steep,) = runs(client, request)["steep"]
    assert steep.info.status == "KILLED"


def test_off_without_a_tracking_uri(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking.begin_pipeline("r1", {}, store=Store.open(str(tmp_path / "store"))) is None
    tracking.end_pipeline("r1", status="FINISHED")
    assert brew(tmp_path) == 0
    assert capsys.readouterr().out.count("tracking: off") == 1


def test_unusable_tracking_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////proc/nowhere/mlflow.db")
    assert brew(tmp_path) == os.EX_TEMPFAIL
    assert "reflux brew: MLFLOW_TRACKING_URI" in capsys.readouterr().err


@pytest.mark.slow  # each moment takes a stage with a database of its own
def test_mlflow_that_goes_away_at_any_moment_is_one_clear_line(
    tmp_path: Path, empty_mlflow: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its database loses its tables before one call of the client after the other, until a stage needs no more."""
    from mlflow import MlflowClient

    monkeypatch.delenv("REFLUX_PARENT_PID", raising=False)
    calls = [name for name, member in vars(MlflowClient).items() if callable(member) and not name.startswith("_")]
    originals = {name: getattr(MlflowClient, name) for name in calls}
    for moment in range(100):
        folder = tmp_path / str(moment)
        folder.mkdir()
        database = Path(shutil.copy(empty_mlflow, folder / "mlflow.db"))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
        left = [moment]

        def failing(name: str, database: Path = database, left: list[int] = left) -> Any:
            def call(*given: Any, **named: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    os.truncate(database, 0)
                return originals[name](*given, **named)

            return call

        for name in calls:
            monkeypatch.setattr(MlflowClient, name, failing(name))
        code = brew(folder)
        said = capsys.readouterr().err.splitlines()
        if left[0] >= 0:
            assert (code, said) == (0, [])
            break
        assert code == os.EX_TEMPFAIL, moment
        (line,) = [line for line in said if line.startswith("reflux brew: MLFLOW_TRACKING_URI sqlite:")]
        assert "MLflow cannot be used (" in line
    assert moment > 10


def test_the_password_of_an_address_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9")
    with pytest.raises(
        ConnectionError, match=r"http://127\.0\.0\.1:9: MLflow cannot be used \(API request to http://127"
    ) as e:
        mlflow_connection.check()
    assert "secret" not in str(e.value)


def test_a_quote_in_a_run_name_is_refused(tmp_path: Path, client: Any) -> None:
    with pytest.raises(ValueError, match="a quote, or a backslash at its end, cannot be searched for"):
        tracking.begin_pipeline("it's", {}, store=Store.open(str(tmp_path / "store")))
