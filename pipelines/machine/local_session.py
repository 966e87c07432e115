"""One pipeline run through kfp.local, whatever runs its stages: its display, its results, its error.

kfp.local walks the graph and hands every stage to a task handler. A runner (process_runner.py, docker_runner.py) puts
its own in the place of kfp's for as long as a session lasts; what the end of a stage means is decided here, once.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from kfp import local
from kfp.components import load_component_from_text
from kfp.local import config as kfp_config

from reflux.components import environment
from reflux.pipelines.machine.stage_output import Display

PROGRAM = ["python3", "-m", "reflux.components"]
"""How the command of every stage begins; after it come the stage, `--executor-input` and KFP's JSON."""
_TAIL_LINES = 50  # kept of a stage's output, to find the error in


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


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How the program of a stage ended."""

    code: int
    """0 is success, -N that signal N ended it where there is no container."""
    cause: str = ""
    """Why it ended, where the runner knows; otherwise the stage's own output says it."""


@dataclass
class Session:
    """One pipeline run, as its runner needs to know it."""

    display: Display
    on_finished: Callable[[str, StageResult], None]
    results: dict[str, StageResult] = field(default_factory=dict)
    failure: StageError | None = None
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))

    def environment(self) -> dict[str, str]:
        """What every stage's program gets: its lines arrive at once and in a form that the display reads, and an image
        of another version says so.
        """
        form = "json" if self.display.is_terminal else "plain"
        return {"PYTHONUNBUFFERED": "1", "REFLUX_PROGRESS": form, environment.COMPILED_BY: environment.version()}

    def line(self, text: str) -> None:
        """One line of the running stage's output."""
        self.tail.append(text)
        self.display.line(text)

    def carry_out(self, command: list[str], execute: Callable[[str], Ending]) -> bool:
        """Run the stage of a command, which `execute` takes to its end; whether it succeeded."""
        name, executor_input = command[3].rpartition(".")[2], json.loads(command[5])
        self.tail.clear()
        self.display.begin(name)
        began = time.monotonic()
        ending = execute(name)
        seconds = time.monotonic() - began
        try:
            if ending.code != 0:
                raise StageError(name, _reason(ending, self.tail, name), ending.code)
            result = _result(name, executor_input, seconds)
        except StageError as error:
            self.failure = error
            return False
        if result is not None:
            self.results[name] = result
            self.on_finished(name, result)
        self.display.end(seconds)
        return True


Runner = Callable[[Session], AbstractContextManager[Any]]
"""Within the block, kfp.local runs stages for this session with the kfp runner that the block yields."""


def run_pipeline(
    pipeline: str,
    arguments: Mapping[str, Any],
    *,
    root: Path,
    runner: Runner,
    on_finished: Callable[[str, StageResult], None] = lambda stage, result: None,
) -> dict[str, StageResult]:
    """Run compiled YAML text to its end; the result of every stage, in the order in which they ran.

    `root` is the folder for kfp's own files (manifest copies). `on_finished` hears of every stage as soon as it is
    committed. Call it from the main thread, since stages die with the thread that started them. StageError if a stage
    fails; the stages before it stay committed in the store.
    """
    if kfp_config.LocalExecutionConfig.instance is not None:
        raise RuntimeError("kfp.local holds its settings in globals: one pipeline at a time in a process")
    component = load_component_from_text(pipeline)
    with Display(total=len(component.pipeline_spec.deployment_spec["executors"])) as display:
        session = Session(display=display, on_finished=on_finished)
        try:
            with runner(session) as kfp_runner, _kfp_local(kfp_runner, root):
                component(**arguments)
        except RuntimeError:  # kfp's summary of a failed task says less than the task did
            if session.failure is None:
                raise
    if session.failure is not None:
        raise session.failure
    return session.results


@contextlib.contextmanager
def _kfp_local(kfp_runner: Any, root: Path) -> Iterator[None]:
    """kfp.local set up, and its own log (colours, rulers, timestamps) kept from the terminal."""
    local.init(kfp_runner, pipeline_root=str(root), raise_on_error=True)
    try:
        with contextlib.redirect_stdout(StringIO()):
            yield
    finally:
        kfp_config.LocalExecutionConfig.instance = None


def _reason(ending: Ending, tail: deque[str], stage: str) -> str:
    """What the runner knows, else the stage's own message, else the last line of what it said."""
    if ending.cause:
        return ending.cause
    own = f"reflux {stage}: "
    for line in reversed(tail):
        if line.startswith(own):
            return line.removeprefix(own)
    said = next((line for line in reversed(tail) if line.strip()), "no output")
    return f"exit code {ending.code}: {said}"


def _result(stage: str, executor_input: dict[str, Any], seconds: float) -> StageResult | None:
    """What the stage told KFP in its executor output about its artifact. StageError if it told nothing; None for a task
    that is no stage and makes none.
    """
    if not executor_input["outputs"].get("artifacts"):
        return None
    path = Path(executor_input["outputs"]["outputFile"])
    try:
        told = json.loads(path.read_text(encoding="utf-8"))["artifacts"]
    except FileNotFoundError:
        raise StageError(stage, f"it ended, but its result is not on this machine ({path} is missing)", 0) from None
    artifact = next(a["artifacts"][0] for a in told.values() if "digest" in a["artifacts"][0]["metadata"])
    metadata = artifact["metadata"]
    return StageResult(
        manifest=Path(artifact["uri"]),
        key=metadata["key"],
        digest=metadata["digest"],
        reused=metadata["reused"] == "yes",
        seconds=seconds,
    )
