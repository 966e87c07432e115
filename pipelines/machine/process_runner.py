"""Stages as processes of this interpreter: no container, no cluster, no activated venv.

kfp.local's SubprocessRunner does all of it but three things, and one class here overrides exactly those:

- it refuses container components, by two validations, though their command runs here as well as in a container;
- it replaces the text `python3` inside every argument, a model under lib/python3.11/ or a prompt included: here only
  the program itself is replaced, by the running interpreter;
- it prints what a stage prints as it comes: here the session gets it line by line.

These are internals of kfp and change with its versions: their test (test_process_runner.py) pins what is used here.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kfp import local
from kfp.local import subprocess_task_handler
from kfp.local.status import Status

from reflux.pipelines.machine.local_session import PROGRAM, Ending, Runner, Session

_GRACE_S = 3.0


def in_processes(environment: Mapping[str, str] | None = None) -> Runner:
    """`environment` is added to this process's for the stages: store credentials, MLFLOW_TRACKING_URI."""

    @contextmanager
    def runner(session: Session) -> Iterator[Any]:
        stock = subprocess_task_handler.SubprocessTaskHandler
        added = {**(environment or {}), **session.environment(), "REFLUX_PARENT_PID": str(os.getpid())}
        handler = functools.partial(StageHandler, session=session, added=added)
        subprocess_task_handler.SubprocessTaskHandler = handler
        try:
            yield local.SubprocessRunner(use_venv=False)
        finally:
            subprocess_task_handler.SubprocessTaskHandler = stock

    return runner


class StageHandler(subprocess_task_handler.SubprocessTaskHandler):
    """kfp.local's task handler for our container components."""

    def __init__(self, *, session: Session, added: Mapping[str, str], **given_by_kfp: Any) -> None:
        super().__init__(**given_by_kfp)
        self.session, self.added = session, added

    def validate_not_container_component(self, full_command: list[str]) -> None:
        if full_command[:3] != PROGRAM:
            raise RuntimeError(f"only stages of reflux run without containers, not {full_command[:4]}")

    def validate_not_containerized_python_component(self, full_command: list[str]) -> None:
        pass  # what kfp means by it starts another module

    def run(self) -> Status:
        command = [sys.executable, *self.full_command[1:]]
        done = self.session.carry_out(self.full_command, lambda _: _run(command, self.session, self.added))
        return Status.SUCCESS if done else Status.FAILURE


def _run(command: list[str], session: Session, added: Mapping[str, str]) -> Ending:
    process = subprocess.Popen(
        command,
        env={**os.environ, **added},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            session.line(line.rstrip("\n"))
        code = process.wait()
    finally:
        _end(process)
    if code >= 0:
        return Ending(code=code)
    hint = " (out of memory, or killed by hand)" if -code == signal.SIGKILL else ""
    return Ending(code=code, cause=f"killed by {signal.Signals(-code).name}{hint}")


def _end(process: subprocess.Popen[str]) -> None:
    """After an interruption, which the terminal sends to the stage too: let it tell MLflow, but leave none behind."""
    try:
        process.wait(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
