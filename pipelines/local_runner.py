"""Run a compiled pipeline on this machine and in this interpreter: no container, no cluster, no activated venv.

kfp.local's SubprocessRunner does all of it but three things, and this module overrides exactly those, in one class:

- it refuses container components, by two validations, though their command runs here as well as in a container;
- it replaces the text `python3` inside every argument, a model under lib/python3.11/ or a prompt included: here only
  the program itself is replaced, by the running interpreter;
- it prints what a stage prints as it comes: here progress reports become a bar and the stage's own error is kept.

These are internals of kfp and change with its versions: tests/pipelines/test_local_runner.py pins what is used here.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from kfp import local
from kfp.components import load_component_from_text
from kfp.local import config as kfp_config
from kfp.local import subprocess_task_handler
from kfp.local.status import Status

from reflux.pipelines.stage_output import Display

_PROGRAM = ["python3", "-m", "reflux.components"]
_TAIL_LINES = 50  # kept of a stage's output, to find the error in
_GRACE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """What a finished stage left: the copy of its manifest, the artifact's key and digest, and how long it took."""

    manifest: Path
    key: str
    digest: str
    reused: bool
    seconds: float


class StageError(Exception):
    """A stage failed. `stage` names it, `message` is what it said itself, `code` is its exit code (-N: by signal N)."""

    def __init__(self, stage: str, message: str, code: int) -> None:
        super().__init__(f"{stage}: {message}")
        self.stage, self.message = stage, message
        # killed or interrupted (a shell and a container say 128 + N), or an outage: the same stage can still succeed
        self.may_pass = code < 0 or code > 128 or code == os.EX_TEMPFAIL


@dataclass
class _Session:
    """One pipeline run, as the task handler, which kfp constructs, needs to know it."""

    environment: Mapping[str, str]
    display: Display
    on_finished: Callable[[str, StageResult], None]
    results: dict[str, StageResult] = field(default_factory=dict)
    failure: StageError | None = None


_session: _Session | None = None


def run_pipeline(
    pipeline: str,
    arguments: Mapping[str, Any],
    *,
    root: Path,
    environment: Mapping[str, str] | None = None,
    on_finished: Callable[[str, StageResult], None] = lambda stage, result: None,
) -> dict[str, StageResult]:
    """Run compiled YAML text to its end; the result of every stage, in the order in which they ran.

    `root` is the folder for kfp's own files (manifest copies). `environment` is added to this process's for the stages:
    store credentials, MLFLOW_TRACKING_URI. `on_finished` hears of every stage as soon as it is committed. Call it from
    the main thread, since stages die with the thread that started them. StageError if a stage fails; the stages before
    it stay committed in the store.
    """
    global _session
    if _session is not None:
        raise RuntimeError("kfp.local holds its settings in globals: one pipeline at a time in a process")
    component = load_component_from_text(pipeline)
    total = len(component.pipeline_spec.root.dag.tasks)
    with Display(total=total) as display:
        session = _session = _Session(environment=environment or {}, display=display, on_finished=on_finished)
        try:
            with _overridden(root):
                component(**arguments)
        except RuntimeError:  # kfp's summary of a failed task says less than the task did
            if session.failure is None:
                raise
        finally:
            _session = None
    if session.failure is not None:
        raise session.failure
    return session.results


@contextlib.contextmanager
def _overridden(root: Path) -> Iterator[None]:
    """kfp.local set up with our task handler, and its own log (colours, rulers, timestamps) kept from the terminal."""
    stock = subprocess_task_handler.SubprocessTaskHandler
    subprocess_task_handler.SubprocessTaskHandler = StageHandler
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(root), raise_on_error=True)
    try:
        with contextlib.redirect_stdout(StringIO()):
            yield
    finally:
        kfp_config.LocalExecutionConfig.instance = None
        subprocess_task_handler.SubprocessTaskHandler = stock


class StageHandler(subprocess_task_handler.SubprocessTaskHandler):
    """kfp.local's task handler for our container components."""

    def validate_not_container_component(self, full_command: list[str]) -> None:
        if full_command[:3] != _PROGRAM:
            raise RuntimeError(f"only stages of reflux run without containers, not {full_command[:4]}")

    def validate_not_containerized_python_component(self, full_command: list[str]) -> None:
        pass  # what kfp means by it starts another module

    def run(self) -> Status:
        assert _session is not None
        stage, executor_input = self.full_command[3], json.loads(self.full_command[5])
        name = stage.rpartition(".")[2]
        _session.display.begin(name)
        began = time.monotonic()
        code, tail = _run_stage([sys.executable, *self.full_command[1:]], _session)
        seconds = time.monotonic() - began
        if code != 0:
            _session.failure = StageError(name, _reason(code, tail, name), code)
            return Status.FAILURE
        result = _session.results[name] = _result(executor_input, seconds)
        _session.on_finished(name, result)
        _session.display.end(seconds)
        return Status.SUCCESS


def _run_stage(command: list[str], session: _Session) -> tuple[int, list[str]]:
    """Run a stage, its output going to the display line by line; the exit code and the last lines."""
    environment = {
        **os.environ,
        **session.environment,
        "PYTHONUNBUFFERED": "1",
        "REFLUX_PARENT_PID": str(os.getpid()),
        "REFLUX_PROGRESS": "json" if session.display.is_terminal else "plain",
    }
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            tail.append(line.rstrip("\n"))
            session.display.line(line.rstrip("\n"))
        return process.wait(), list(tail)
    finally:
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """After an interruption, which the terminal sends to the stage too: let it tell MLflow, but leave none behind."""
    try:
        process.wait(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _reason(code: int, tail: list[str], stage: str) -> str:
    """The stage's own message where it gave one, else the last line of its traceback, else how it died."""
    if code < 0:
        hint = " (out of memory, or killed by hand)" if -code == signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{hint}"
    own = f"reflux {stage}: "
    for line in reversed(tail):
        if line.startswith(own):
            return line.removeprefix(own)
    said = next((line for line in reversed(tail) if line.strip()), "no output")
    return f"exit code {code}: {said}"


def _result(executor_input: dict[str, Any], seconds: float) -> StageResult:
    """What the stage told KFP in its executor output about its artifact."""
    told = json.loads(Path(executor_input["outputs"]["outputFile"]).read_text(encoding="utf-8"))["artifacts"]
    artifact = next(a["artifacts"][0] for a in told.values() if "digest" in a["artifacts"][0]["metadata"])
    metadata = artifact["metadata"]
    return StageResult(
        manifest=Path(artifact["uri"]),
        key=metadata["key"],
        digest=metadata["digest"],
        reused=metadata["reused"] == "yes",
        seconds=seconds,
    )
