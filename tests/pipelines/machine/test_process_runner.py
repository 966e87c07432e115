"""Stages as processes: real declared components through kfp.local, and the internals of kfp that this leans on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import kfp
import pytest
from kfp.local import config as kfp_config
from kfp.local import subprocess_task_handler, task_dispatcher
from toy_stages.pipeline import party

from reflux.components.artifacts import Artifact
from reflux.components.storage import Store
from reflux.pipelines import recipes
from reflux.pipelines.compile import compile_to_text
from reflux.pipelines.distillation import distillation
from reflux.pipelines.machine.local_session import StageError, run_pipeline
from reflux.pipelines.machine.process_runner import in_processes

TESTS = Path(__file__).parents[2]
COMMAND = ["python3", "-m", "reflux.components", "toy_stages.brew", "--executor-input", '{"x": "/lib/python3.11/m"}']


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("PATH", "/nowhere")  # the venv is not activated, and there is no python3 to be found


def test_two_stages_leave_artifacts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note = "ask python3 {{name}} \"twice\" 'ü'"
    results = party(tmp_path, note=note, minutes=7)
    assert list(results) == ["brew", "pour"]
    store = Store.open(str(tmp_path / "store"))
    for stage, result in results.items():
        artifact = Artifact.load(store, result.manifest.read_bytes())
        assert (artifact.stage, artifact.key, artifact.digest) == (stage, result.key, result.digest)
        assert result.seconds > 0
        assert not result.reused
    tea = Artifact.open(store, "brew", results["brew"].key)
    assert tea.file("tea.txt").decode() == f"assam|7|{note}"

    output = capsys.readouterr().out
    assert "[1/2] brew" in output
    assert "brewing assam" in output
    assert "progress 100 %  4/4 minutes" in output
    assert "INFO" not in output  # kfp's own log

    again = party(tmp_path, note=note, minutes=7)
    assert {s: (r.digest, r.reused) for s, r in again.items()} == {s: (r.digest, True) for s, r in results.items()}


def test_overrides_of_the_form_decide_what_is_made(tmp_path: Path) -> None:
    """A struct's whole numbers arrive as floats; the artifact is that of the values that a stage ends up with."""
    form = {"run": "", "overrides": {"brew": {"minutes": 7}}}
    results = party(tmp_path, form=form, minutes=3)
    assert results["brew"].key == party(tmp_path, minutes=7)["brew"].key
    tea = Artifact.open(Store.open(str(tmp_path / "store")), "brew", results["brew"].key)
    assert tea.file("tea.txt").decode() == "assam|7|"
    with pytest.raises(StageError, match=r"brew: brew\.minutes: 7\.5 is not a whole number"):
        party(tmp_path, form={"overrides": {"brew": {"minutes": 7.5}}})


@pytest.mark.filterwarnings("ignore:Task .* have no effect in the current local runner")  # a pipeline for a cluster
def test_a_wrong_form_is_refused_before_the_first_stage(tmp_path: Path) -> None:
    """The whole pipeline, as the form of Kubeflow starts it."""
    text = compile_to_text(distillation(recipes.demo(), name="demo"))
    overrides = {"distill": {"max_steps": 10.5}}
    with pytest.raises(StageError, match=r"^prerequisites: distill\.max_steps: 10\.5 is not a whole number$"):
        run_pipeline(
            text, {"store": str(tmp_path), "overrides": overrides}, root=tmp_path / "kfp", runner=in_processes()
        )
    assert [path.name for path in (tmp_path / "kfp").glob("*/*") if path.name != "prerequisites"] == []


@pytest.mark.parametrize(
    ("fault", "message", "may_pass"),
    [
        ("value", "brew: brew.leaves: too old, from 2 to 5 days are allowed", False),
        ("crash", "brew: RuntimeError: the pot broke", False),
        ("outage", "brew: store s3://pantry: no answer", True),
        ("kill", "brew: killed by SIGKILL", True),
    ],
)
def test_a_failing_stage_speaks_for_itself(tmp_path: Path, fault: str, message: str, may_pass: bool) -> None:
    with pytest.raises(StageError) as caught:
        party(tmp_path, fault=fault)
    assert str(caught.value).startswith(message)
    assert caught.value.stage == "brew"
    assert caught.value.may_pass == may_pass, "only then is it worth telling people to repeat the command"
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert kfp_config.LocalExecutionConfig.instance is None  # kfp is left as it was


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    """In a real pseudo-terminal, from a process of its own."""
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from toy_stages.pipeline import party\n"
        "party(Path(sys.argv[2]), note='[bold] layer')\n"
    )
    done = in_terminal([sys.executable, "-c", code, str(TESTS), str(tmp_path)])
    assert "brewing assam" in done
    assert "reflux_progress" not in done
    assert "4/4" in done
    assert "[bold] layer" in done


@pytest.mark.parametrize("how", ["kill -9", "Ctrl-C"])
def test_no_stage_outlives_its_runner(tmp_path: Path, how: str) -> None:
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1])\n"
        "from toy_stages.pipeline import party\n"
        "party(Path(sys.argv[2]), fault='sleep')\n"
    )
    command = [sys.executable, "-c", code, str(TESTS), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as runner:
        assert runner.stdout is not None
        line = next(line for line in runner.stdout if "sleeping as" in line)
        stage = int(line.split()[-1])
        assert alive(stage)
        if how == "kill -9":
            runner.kill()
        else:
            os.killpg(runner.pid, signal.SIGINT)  # a terminal sends it to all that run in it
        assert runner.wait(timeout=20) != 0
        deadline = time.monotonic() + 10
        while alive(stage) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not alive(stage)


def alive(pid: int) -> bool:
    """Running, and not merely waiting for its exit code to be collected."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def in_terminal(command: list[str]) -> str:
    """What a command writes to a pseudo-terminal."""
    primary, secondary = os.openpty()
    process = subprocess.Popen(
        command, stdin=secondary, stdout=secondary, stderr=secondary, env={**os.environ, "TERM": "xterm"}
    )
    os.close(secondary)
    seen = b""
    try:
        while chunk := os.read(primary, 65536):
            seen += chunk
    except OSError:  # Linux's end of file on a pseudo-terminal
        pass
    finally:
        os.close(primary)
        process.wait(timeout=60)
    return seen.decode(errors="replace")


class TestContractWithKfp:
    """What process_runner.py overrides exists, and is still needed. If a test fails here, read that module anew."""

    def test_version(self) -> None:
        assert version("kfp").startswith("2.17."), kfp.__version__

    def test_handler_is_looked_up_when_a_task_runs(self) -> None:
        assert task_dispatcher.subprocess_task_handler is subprocess_task_handler

    def test_stock_handler_refuses_container_components(self) -> None:
        with pytest.raises(RuntimeError, match="Container Component"):
            subprocess_task_handler.SubprocessTaskHandler(
                image="reflux/python", full_command=COMMAND, pipeline_root="/tmp", runner=kfp.local.SubprocessRunner()
            )

    def test_stock_replacement_of_the_interpreter_breaks_paths(self) -> None:
        replaced = subprocess_task_handler.replace_python_executable(COMMAND, "/venv/bin/python")
        assert replaced[0] == "/venv/bin/python"
        assert "/lib/python3.11/m" not in replaced[-1]
