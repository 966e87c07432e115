"""What can be known of the container runner without an engine: what containers get, what is refused, what kfp offers.

tests/cluster/ runs it against a real engine.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner
from kfp.local import docker_task_handler

from reflux.pipelines.__main__ import cli
from reflux.pipelines.machine import container_engine
from reflux.pipelines.machine.container_mounts import view
from reflux.pipelines.store.stores import StoreRef

S3 = StoreRef(kind="s3", uri="s3://bucket/prefix")


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"REFLUX_CACHE": str(tmp_path / "cache")}


def test_paths_are_mounted_where_they_are_and_only_results_are_writable(
    tmp_path: Path, home: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "labels.csv").touch()
    monkeypatch.chdir(tmp_path)
    sources = {
        "teacher": "s3://models/big", "student": "model", "prompts_uri": "builtin:demo_prompts.jsonl",
        "labels_uri": (tmp_path / "labels.csv").as_uri(), "eval_text_uri": "",
    }  # fmt: skip
    directory = StoreRef(kind="directory", uri=str(tmp_path / "store"))
    seen = view(sources, directory, home, network="host")
    assert seen.writable == {
        tmp_path / "model": False,
        tmp_path / "labels.csv": False,
        tmp_path / "store": True,
        tmp_path / "cache": True,
    }
    assert all(path.exists() for path in seen.writable), "an engine would make a missing folder as root"
    named = {"student": str(tmp_path / "model"), "labels_uri": str(tmp_path / "labels.csv")}
    assert seen.sources == sources | named


def test_a_model_in_a_package_is_found_in_the_container(home: dict[str, str]) -> None:
    seen = view({"teacher": "package:kfp"}, S3, home, network="host")
    folder = Path(inspect.getfile(docker_task_handler)).parents[1]
    assert seen.writable[folder] is False
    assert seen.environment["PYTHONPATH"] == str(folder.parent)
    assert seen.sources == {"teacher": "package:kfp"}


def test_a_model_of_the_hub_is_read_from_this_machines_copy(
    tmp_path: Path, home: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    seen = view({"teacher": "ORG/NAME@main"}, S3, home, network="host")
    assert seen.writable[tmp_path / "hub"] is False
    assert (seen.environment["HF_HUB_CACHE"], seen.environment["HF_HUB_OFFLINE"]) == (str(tmp_path / "hub"), "1")
    assert seen.sources == {"teacher": "ORG/NAME@main"}


def test_the_environment_has_what_stages_read_and_nothing_else(tmp_path: Path, home: dict[str, str]) -> None:
    (tmp_path / "ca.pem").touch()
    given = {
        "AWS_ACCESS_KEY_ID": "k", "AWS_SESSION_TOKEN": "t", "REFLUX_STORE_ENDPOINT_URL": "http://127.0.0.1:1",
        "MLFLOW_TRACKING_TOKEN": "m", "OMP_NUM_THREADS": "1", "AWS_CA_BUNDLE": str(tmp_path / "ca.pem"),
        "HTTPS_PROXY": "http://proxy",
    }  # fmt: skip
    seen = view({}, S3, {**home, **given, "PATH": "/bin", "REFLUX_PARENT_PID": "1", "SECRET": "x"}, network="host")
    files = {"AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"}  # of whoever runs this test
    assert {name: value for name, value in seen.environment.items() if name not in files} == given | home
    assert seen.writable[tmp_path / "ca.pem"] is False


def test_what_no_container_reaches_is_refused_by_name(tmp_path: Path, home: dict[str, str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"student .*: weights is a link to outside"):
        view({"student": str(tmp_path / "model")}, S3, home, network="host")
    with pytest.raises(ValueError, match="package:no_such_module"):
        view({"teacher": "package:no_such_module"}, S3, home, network="host")
    with pytest.raises(ValueError, match="containers track through a server; start `mlflow server`"):
        view({}, S3, {**home, "MLFLOW_TRACKING_URI": "sqlite:///mlflow.db"}, network="host")
    local = {**home, "REFLUX_STORE_ENDPOINT_URL": "http://127.0.0.1:9000"}
    view({}, S3, local, network="host")
    with pytest.raises(ValueError, match=r"--network mine: REFLUX_STORE_ENDPOINT_URL is 127.0.0.1:9000"):
        view({}, S3, local, network="mine")


def test_no_engine_is_one_clear_line_before_anything_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    result = CliRunner().invoke(cli, ["run", "--recipe", "demo", "--runner", "docker"])
    assert result.exit_code == 2, result.output
    assert f"no container engine answers at unix://{tmp_path}/none.sock" in result.output
    assert not list(tmp_path.iterdir()), "nothing was begun"


def test_lines_that_the_engine_cuts_anywhere_are_whole_again() -> None:
    text = "grün\nüber\r\n\nohne Ende"
    data = text.encode()
    for size in range(1, len(data) + 1):
        chunks = (data[n : n + size] for n in range(0, len(data), size))
        assert list(container_engine._lines(chunks)) == ["grün", "über", "", "ohne Ende"]


class TestContractWithKfp:
    """What docker_runner.py replaces exists, and is still needed. If a test fails here, read that module anew."""

    def test_version(self) -> None:
        assert version("kfp").startswith("2.17.")

    def test_the_function_is_looked_up_when_a_task_runs_and_gets_what_ours_takes(self) -> None:
        assert "run_docker_container" in docker_task_handler.DockerTaskHandler.run.__code__.co_names
        names = list(inspect.signature(docker_task_handler.run_docker_container).parameters)
        assert names == ["client", "image", "command", "volumes", "container_run_args"]

    def test_the_stock_function_takes_a_container_that_is_gone_for_a_success(self) -> None:
        source = inspect.getsource(docker_task_handler.run_docker_container)
        assert "auto_remove=True" in source
        assert "except docker.errors.NotFound" in source
