"""The command line: reflux run | report | evaluate | label-tasks | compile | submit | watch | schedule | lineage | …

Commands stand in cli/, a file for each kind. They are thin: each parses, calls one function of its module, prints.
Modules are imported inside the commands, so that `reflux --help` starts at once and a command needs no more packages
than its own work does.

Exit codes: 0 done; 1 a stage failed or an object does not match; 2 the command or its input is wrong; 3 the run is
complete and its gate says fail; 4 a run on a cluster was lost sight of; 130 interrupted.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

import click

from reflux.pipelines.cli import (
    doctor,
    evaluate,
    kubeflow,
    promote,
    register,
    replay,
    results,
    run,
    schedule,
    store,
    submit,
)


class WrongInput(click.ClickException):
    """The command or what it names is wrong."""

    exit_code = 2


class Commands(click.Group):
    """Turns Ctrl-C and the errors that modules raise for people into a message and an exit code.

    Other errors keep their traceback.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, OSError) as error:
            raise WrongInput(str(error)) from error
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(run.INTERRUPTED)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="reflux")
def cli() -> None:
    """Distil a large teacher into a small, low-bit student, and keep the trail from which anyone can verify it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as Ctrl-C: leave the store in order


COMMANDS = (
    run.run,
    results.report,
    evaluate.evaluate,
    results.label_tasks,
    kubeflow.compile_,
    kubeflow.lint,
    register.register,
    submit.submit,
    submit.watch,
    schedule.schedule,
    results.lineage,
    promote.promote,
    doctor.doctor,
    replay.replay,
    store.store,
)
for command in COMMANDS:
    cli.add_command(command)


def main() -> None:
    cli(prog_name="reflux")


if __name__ == "__main__":
    main()
