"""What every test shares: one thread per worker, a tiny language model on disk, and both kinds of store."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import seaweed
from tiny_model import save_tiny_model

from reflux.components.storage import S3Settings, Store


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a two-layer model and a byte-level tokenizer: all that a real one has, milliseconds a forward."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Settings]:
    """Settings of a running S3 server with the bucket `reflux`."""
    with seaweed.running(tmp_path_factory.mktemp("seaweed")) as settings:
        yield settings


@pytest.fixture(params=["directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store; every promise about artifacts is tested on a directory and on a real S3 server."""
    if request.param == "directory":
        return Store.open(str(tmp_path / "store"))
    return Store.open(f"s3://{seaweed.BUCKET}/{uuid.uuid4().hex}", request.getfixturevalue("s3"))
