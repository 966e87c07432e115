"""Where the tests of a Triton kernel run: on a GPU if there is one, else in Triton's interpreter on the CPU.

The interpreter must be asked for before Triton is imported, so without a GPU a file of such tests runs in a process of
its own. It cannot compute in bfloat16, and takes about a millisecond for each program of a launch.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
KERNELS_RUN = DEVICE == "cuda" or INTERPRETED
runs_the_kernel = pytest.mark.skipif(not KERNELS_RUN, reason="runs in the interpreter's process")
starts_the_interpreter = pytest.mark.skipif(KERNELS_RUN, reason="the tests of this file run here")


def run_interpreted(file: str) -> None:
    """All tests of the file pass in a process whose kernels are interpreted."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", file]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on an element that a kernel forgets to write is NaN, not what happened to lie there."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: _poisoned(empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: _poisoned(empty_like(*args, **kwargs)))


def _poisoned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor
