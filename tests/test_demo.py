"""The demo's own command on the real model, cut short: what `make demo` does, in a couple of minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHORT = {
    "collect_traces": {"max_new_tokens": 12},
    "profile_kv": {"profiled_traces": 4, "cost_traces": 1, "cost_tokens": 4},
    "distill": {"max_steps": 2, "rollout_batch": 4, "rollout_new_tokens": 8, "validation_traces": 2},
    "calibrate": {"check_traces": 1},
    "evaluate": {
        "windows": 1,
        "window_tokens": 128,
        "heldout_traces": 4,
        "generations": 1,
        "generation_tokens": 8,
        "latency_tokens": 20,
    },
}
SCHEMES = ["fp32", "w4a16_rtn", "w4a4_plain", "w4a4_dual", "w4a4_distilled"]


def reflux(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "AWS_", "OMP_"))
    }
    return subprocess.run(
        [sys.executable, "-m", "reflux.pipelines", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_runs_on_the_real_model(tmp_path: Path) -> None:
    (tmp_path / "short.json").write_text(json.dumps(SHORT))
    run = reflux(tmp_path, "run", "--recipe", "demo", "--config", "short.json", "--store", "store", "--name", "short")
    assert run.returncode in (0, 3), run.stdout + run.stderr  # two steps need not pass the gate
    assert run.stdout.splitlines()[-1] == "run: reflux-data/runs/short"

    report = json.loads(reflux(tmp_path, "report", "short", "--json").stdout)
    rows = {row["scheme"]: row for row in report["table"]}
    assert list(rows) == SCHEMES
    assert rows["fp32"]["perplexity"] < rows["w4a16_rtn"]["perplexity"] < rows["w4a4_dual"]["perplexity"]
    assert rows["w4a4_dual"]["perplexity"] < rows["w4a4_plain"]["perplexity"] / 10  # one scale per token destroys it
    assert rows["fp32"]["pmr"] == pytest.approx(1.0, abs=1e-6)
    assert reflux(tmp_path, "lineage", "short").returncode == 0
