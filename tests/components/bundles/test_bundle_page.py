"""The programs on docs/bundle.md, run as they are written, beside a bundle and where reflux is not installed."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from tiny_bundle import write_tiny_bundle

PAGE = Path(__file__).resolve().parents[3] / "docs" / "bundle.md"


def test_its_python_runs_as_written(tiny_model: Path, tmp_path: Path) -> None:
    write_tiny_bundle(tmp_path / "bundle", tiny_model)
    programs = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(programs) == 2
    last = "print(type(model).__name__, model.rounds_activations)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", "\n".join([*programs, last])],  # -S: without what makes reflux importable
        cwd=tmp_path,
        env={"PYTHONPATH": sysconfig.get_path("purelib"), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        text=True,
        errors="replace",
        capture_output=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "LlamaForCausalLM True"
