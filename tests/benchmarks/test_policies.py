"""The one command that measures policies, on the tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "policies.py"


@pytest.mark.slow
def test_one_command_measures_every_policy_beside_the_table(tiny_model: Path) -> None:
    small = {
        "--model": tiny_model, "--group-size": 32, "--tokens": 6, "--rounds": 1, "--profiled": 4, "--windows": 2,
        "--window-tokens": 80,
    }  # fmt: skip
    options = [str(text) for option in small.items() for text in option]
    done = subprocess.run([sys.executable, str(SCRIPT), *options], stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["policies"].keys() == {"lookup", "mlp", "attention"} == result["ratios"].keys()
    assert set(result["ratios"]["lookup"].values()) == {1.0}
    table, mlp, attention = (result["policies"][kind] for kind in ("lookup", "mlp", "attention"))
    assert table["policy_bytes"] == 8 * 13 * 2 * 4
    assert (table["kept_bytes"], mlp["kept_bytes"], attention["kept_bytes"]) == (0, 64 * 512 * 4, 128 * 512 * 4)
    parameters = 64 * 64 + 64 + 64 * 4 + 4  # of the one layer that is read
    assert mlp["policy_bytes"] - table["policy_bytes"] == 4 * parameters
    assert mlp["memory_bytes"] - table["memory_bytes"] == 4 * parameters + mlp["kept_bytes"]
    assert all(row["step_ms_batch_1"] > 0 and row["step_ms_batch_4"] > 0 for row in result["policies"].values())
    assert result["k_norms"].keys() == {"0.0", "0.25", "0.5", "1.0"}
    assert all(row["kl_nats"] > 0 for row in result["k_norms"].values())
    assert all(0 < row["outlier_capture"] <= 1 for row in result["k_norms"].values())
    errors = list(result["interpolation"].values())
    assert errors == sorted(errors, reverse=True)
