"""What a person sees of running stages: their own lines, with a bar below them on a terminal."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from reflux.components import progress


class Display:
    """Prints stages' output to the stdout of the moment of its creation, whatever is redirected later."""

    def __init__(self, *, total: int) -> None:
        self.console = Console(file=sys.stdout)
        self.is_terminal = self.console.is_terminal
        self.total, self.started = total, 0
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}", markup=False),
            TextColumn("{task.fields[left]}", style="dim", markup=False),
            console=self.console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not self.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, stage: str) -> None:
        self.started += 1
        self._print(f"[{self.started}/{self.total}] {stage}", "bold")
        self._task = self._bar.add_task(stage, total=None, unit="", left="")

    def line(self, line: str) -> None:
        """One line of a stage's output: a progress report moves the bar, anything else is printed as it is."""
        report = progress.parse(line) if self.is_terminal else None
        if report is None:
            self.console.print(Text.from_ansi(f"  {line}"), soft_wrap=True)
        elif self._task is not None:
            left = f"{progress.duration(report.left_s)} left" if report.left_s else ""
            note = f" {report.note}" if report.note else ""
            self._bar.update(
                self._task,
                completed=report.done,
                total=report.total,
                unit=report.unit,
                left=f"{left}{note}".strip(),
                refresh=True,
            )

    def end(self, seconds: float) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
        self._print(f"  done in {progress.duration(seconds)}", "green")

    def _print(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style), soft_wrap=True)
