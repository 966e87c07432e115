"""The one command that measures forms of cache and rotations, on the tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "attention_forms.py"

ROWS = (
    "full",
    "cache int8",
    "cache kivi2",
    "rope 8",
    "rope 4",
    "turned",
    "a4 dual",
    "w4a4 hadamard",
    "a4 dual, equalised",
)


@pytest.mark.slow
def test_one_command_measures_every_kind_of_form(tiny_model: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--model", str(tiny_model), "--data", "", "--windows", "2"]
    options = ["--window-tokens", "100", "--rows", *ROWS]
    done = subprocess.run([*command, *options], stdout=subprocess.PIPE, text=True, check=True)
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    full = rows["full"]["perplexity"]
    assert rows["turned"]["perplexity"] == pytest.approx(full, rel=1e-4)
    changed = {name: row["perplexity"] for name, row in rows.items() if name not in ("full", "turned")}
    assert all(0.5 * full < perplexity < 2 * full and perplexity != full for perplexity in changed.values())
    assert len(set(changed.values())) == len(changed) == 7
    taken = [rows[name]["kv_cache_bytes"] for name in ("full", "cache kivi2", "cache int8")]
    assert taken == sorted(taken, reverse=True)
