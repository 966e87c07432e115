"""The one command that says how often a model solves a verifier's tasks, on the tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import verified_task


@pytest.mark.slow
def test_one_command_tries_every_task_at_every_temperature(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny_model: Path
) -> None:
    options = ["--model", str(tiny_model), "--problems", "3", "--group", "2", "--answer-tokens", "4"]
    monkeypatch.setattr(sys, "argv", ["verified_task.py", *options, "--temperatures", "1", "0"])
    verified_task.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result.keys() == set(verified_task.TASKS)
    for found in result.values():
        assert found.keys() == {"1", "0"}
        assert found["0"]["zero_groups"] == 1.0  # one answer has nothing to differ from
        assert all(0 <= row["solved"] < 0.5 for row in found.values())  # it was never taught to add
