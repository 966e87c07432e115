"""What every test shares: one thread per worker and a tiny language model on disk."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from tiny_model import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a two-layer model and a byte-level tokenizer: all that a real one has, milliseconds a forward."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))
