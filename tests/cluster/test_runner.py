"""Stages in containers of a real engine: what ends them, what is said about it, and that none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest
from click.testing import CliRunner
from docker import DockerClient
from docker.models.containers import Container
from toy_stages import in_containers as toys
from toy_stages.in_containers import contained_party
from toy_stages.pipeline import party

from reflux.components.storage import Store
from reflux.pipelines.__main__ import cli
from reflux.pipelines.machine import container_engine
from reflux.pipelines.machine.local_session import StageError

from .conftest import build


@pytest.fixture(autouse=True)
def _none_left_behind(engine: DockerClient) -> Iterator[None]:
    yield
    deadline = time.monotonic() + 5
    while ours(engine) and time.monotonic() < deadline:  # somebody else's removal may be under way
        time.sleep(0.1)
    assert ours(engine) == []


def ours(engine: DockerClient) -> list[Container]:
    return engine.containers.list(all=True, filters={"label": container_engine.LOCK_LABEL})


def test_stages_leave_the_same_artifacts_as_processes_do(
    tmp_path: Path, toy_image: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("contained", "plain"):
        (tmp_path / name).mkdir()
    results = contained_party(tmp_path / "contained", toy_image, note="ü 'quoted' {{name}}")
    output = capsys.readouterr().out
    assert "[1/2] brew" in output
    assert "progress 100 %  4/4 minutes" in output
    monkeypatch.setenv("PYTHONPATH", str(Path(toys.__file__).parents[1]))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    expected = party(tmp_path / "plain", note="ü 'quoted' {{name}}")
    assert {s: r.digest for s, r in results.items()} == {s: r.digest for s, r in expected.items()}
    assert Store.open(str(tmp_path / "contained" / "store")).list("objects")
    mine = {path.stat().st_uid for path in (tmp_path / "contained").rglob("*")}
    assert mine == {os.getuid()}, "files belong to whoever started the run"


@pytest.mark.parametrize(
    ("fault", "message", "may_pass"),
    [
        ("value", "brew: brew.leaves: too old, from 2 to 5 days are allowed", False),
        ("crash", "brew: RuntimeError: the pot broke", False),
        ("outage", "brew: store s3://pantry: no answer", True),
    ],
)
def test_a_failing_stage_fails_and_speaks_for_itself(
    tmp_path: Path, toy_image: str, fault: str, message: str, may_pass: bool
) -> None:
    for _ in range(3):  # kfp's own function misses some of them
        with pytest.raises(StageError) as caught:
            contained_party(tmp_path, toy_image, fault=fault)
        assert (str(caught.value), caught.value.may_pass) == (message, may_pass)


def test_out_of_memory_is_said(tmp_path: Path, toy_image: str) -> None:
    with pytest.raises(StageError, match=r"brew: out of memory: it needed more than its limit of 0.5 GiB"):
        contained_party(tmp_path, toy_image, fault="memory", memory="512m")


@pytest.mark.parametrize("how", ["killed", "removed"])
def test_what_is_ended_from_outside_is_started_again_once(
    tmp_path: Path, toy_image: str, engine: DockerClient, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    message = "brew: (killed by SIGKILL|its container was removed)"  # a removal kills first, and either may be seen
    with ended_from_outside(engine, how, times=2), pytest.raises(StageError, match=message) as caught:
        contained_party(tmp_path, toy_image, fault="sleep")
    assert caught.value.may_pass
    output = capsys.readouterr().out
    assert output.count("starting it again, 1 of 1") == 1
    assert output.count("sleeping as") == 2


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_no_container_outlives_an_interrupted_command(
    tmp_path: Path, toy_image: str, engine: DockerClient, sign: signal.Signals
) -> None:
    command = [sys.executable, "-m", "toy_stages.in_containers", str(tmp_path), toy_image, "sleep"]
    environment = {**os.environ, "PYTHONPATH": str(Path(toys.__file__).parents[1])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as runner:
        assert runner.stdout is not None
        next(line for line in runner.stdout if "sleeping as" in line)
        (container,) = ours(engine)
        runner.send_signal(sign)
        assert runner.wait(timeout=30) != 0
    if sign == signal.SIGKILL:
        assert ours(engine) == [container], "nobody was left to remove it"
        (tmp_path / "other").mkdir()
        contained_party(tmp_path / "other", toy_image)  # the next command does, whatever it runs


@pytest.mark.parametrize(
    ("containerfile", "message"),
    [
        ("FROM debian-python:bookworm", "reflux does not run in it (importlib.metadata.PackageNotFoundError"),
        ("FROM scratch\nCOPY toy_stages /t", "reflux does not run in it (the container engine refuses"),
        ('FROM debian-python:bookworm\nENTRYPOINT ["python3"]', "it has an ENTRYPOINT"),
    ],
)
def test_an_image_without_reflux_is_refused_before_anything_begins(
    tmp_path: Path, toy_image: str, engine: DockerClient, monkeypatch: pytest.MonkeyPatch, containerfile: str,
    message: str,
) -> None:  # fmt: skip
    name = build(engine, tmp_path, containerfile)
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    result = CliRunner().invoke(cli, ["run", "--recipe", "demo", "--runner", "docker", "--image", name])
    assert result.exit_code == 2, result.output
    assert f"--image {name}: " in result.output
    assert message in result.output
    assert not list(Path.cwd().iterdir())


def test_a_missing_image_is_refused_with_what_builds_it(engine: DockerClient) -> None:
    result = CliRunner().invoke(cli, ["run", "--recipe", "demo", "--runner", "docker", "--image", "no-python:1"])
    assert result.exit_code == 2, result.output
    assert "--image no-python:1: not on this machine; `make image-cpu` builds it" in result.output


@contextmanager
def ended_from_outside(engine: DockerClient, how: str, *, times: int) -> Iterator[None]:
    """Somebody who ends every container of a stage that has begun to sleep."""

    def end() -> None:
        done: set[str] = set()
        while len(done) < times:
            for container in ours(engine):
                if container.id not in done and b"sleeping as" in container.logs():
                    done.add(container.id)
                    container.kill() if how == "killed" else container.remove(force=True)
            time.sleep(0.1)

    other = Thread(target=end, daemon=True)
    other.start()
    yield
    other.join(timeout=60)
