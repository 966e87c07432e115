"""The task before the first stage, as KFP calls it: it passes, or says in one line what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_run
from servers import seaweed

from reflux.components import __main__ as entry
from reflux.components.kubeflow import prerequisites
from reflux.components.storage import S3Settings, Store
from reflux.pipelines import recipes


@pytest.fixture(autouse=True)
def _untracked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("REFLUX_PARENT_PID", raising=False)


@pytest.fixture
def given(tmp_path: Path, tiny_model: Path) -> dict[str, Any]:
    """The parameters of a small run, as KFP hands them over."""
    small_run.write(tmp_path)
    recipe = recipes.overridden(recipes.demo(), small_run.SMALL)
    form = {
        "store": str(tmp_path / "store"), "run": "", "job": "8f14e45f", "recipe": "demo", "objective": "forward_kl",
        "registered_model": "", "accelerator": "nvidia.com/gpu", "accelerators": "1",
        "teacher": str(tiny_model), "student": str(tiny_model), "prompts_uri": str(tmp_path / "prompts.jsonl"),
        "labels_uri": str(tmp_path / "labels.csv"), "eval_text_uri": "", "entity_model": "",
        "start_uri": "",
        "overrides": {},
    }  # fmt: skip
    configs = {stage: vars(config) for stage, config in recipe.stages().items()}
    return form | {"configs": json.loads(json.dumps(configs), parse_int=float)}


def call(given: Mapping[str, Any], tmp_path: Path) -> int:
    document = {"inputs": {"parameterValues": given}, "outputs": {"outputFile": str(tmp_path / "output.json")}}
    return entry.main(["prerequisites", "--executor-input", json.dumps(document)])


def test_what_is_in_order_passes(given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(given, tmp_path) == 0
    assert "48 prompts, " in capsys.readouterr().out
    assert not list((tmp_path / "store").rglob("*.parquet")), "it makes nothing"


def test_the_form_goes_over_the_recipe_and_the_overrides_over_the_form(given: dict[str, Any]) -> None:
    configs = prerequisites.final_configs(given)
    assert (configs["distill"].objective, configs["distill"].max_steps) == ("forward_kl", 12)
    assert configs["evaluate"].teacher == given["teacher"]
    changed = prerequisites.final_configs(given | {"overrides": {"distill": {"objective": "reverse_kl"}}})
    assert changed["distill"].objective == "reverse_kl"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overrides": {"distill": {"max_steps": 10.5}}}, "distill.max_steps: 10.5 is not a whole number"),
        ({"overrides": {"distil": {"max_steps": 2}}}, "distil: no such stage or source; did you mean distill?"),
        ({"overrides": {"distill": {"group_size": 48}}}, "distill.group_size 48: must divide the 64 input"),
        ({"overrides": {"student": "x"}}, "overrides.student: is a parameter of the run itself"),
        ({"overrides": {"distill": 2.0}}, "distill: a table of fields is expected, not 2.0"),
        ({"overrides": {"kubernetes": {}}}, "overrides.kubernetes: is fixed when a pipeline is compiled"),
        ({"accelerators": "1.0"}, "accelerators '1.0': a whole number for each pod is expected"),
        (
            {"accelerator": "A100"},
            "accelerator 'A100': Kubernetes' name of a resource is expected, e.g. nvidia.com/gpu",
        ),
        ({"objective": "forwards"}, "distill.objective 'forwards'"),
        ({"teacher": "/nowhere"}, "collect_traces.teacher: source '/nowhere': no such file or folder"),
        ({"store": ""}, "store: must not be empty."),
        ({"store": "ftp://x/y"}, "store 'ftp://x/y': allowed are"),
        ({"run": "", "job": ""}, "run: must not be empty."),
    ],
)
def test_what_is_wrong_is_one_line(
    given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    assert call(given | changes, tmp_path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"reflux prerequisites: {message}")


def test_as_on_a_cluster_with_everything_in_s3(
    given: dict[str, Any], s3: S3Settings, tiny_model: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    bucket = Store.open(f"s3://{seaweed.BUCKET}/prerequisites", s3)
    for file in tiny_model.iterdir():
        bucket.write(f"model/{file.name}", file.read_bytes())
    for name, value in (s3.env() | {"REFLUX_CACHE": str(tmp_path / "cache" / "of pods")}).items():
        monkeypatch.setenv(name, value)
    model = f"{bucket.uri}/model"
    given |= {"store": f"{bucket.uri}/store", "teacher": model, "student": model}
    assert call(given, tmp_path) == 0, capsys.readouterr().err
    (weights,) = (tmp_path / "cache").rglob("model.safetensors")
    assert weights.stat().st_blocks * 512 < weights.stat().st_size / 4, "in seconds: the weights stayed where they are"

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2000))
    assert call(given, tmp_path) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"reflux prerequisites: disk {tmp_path / 'cache' / 'of pods'}: 0.0 GB are free, ")
    assert f"of which {model} " in said
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    assert call(given, tmp_path) in (2, 75)
    (line,) = capsys.readouterr().err.splitlines()
    assert "SignatureDoesNotMatch" in line or "secret key" in line


@pytest.mark.slow
def test_the_whole_runs_parameters_are_in_mlflow_and_the_task_is_no_run(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    assert call(given, tmp_path) == 0
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert (run.info.run_name, run.data.tags["reflux.run"]) == ("8f14e45f", "8f14e45f")
    assert run.data.params["recipe"] == "demo"
    assert run.data.params["teacher"] == given["teacher"]


def test_mlflow_that_does_not_answer(
    given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert call(given, tmp_path) == 75
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("reflux prerequisites: MLFLOW_TRACKING_URI http://127.0.0.1:9: MLflow cannot be used")
