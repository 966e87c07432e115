"""What every test shares: one thread per worker, a tiny language model on disk, and both kinds of store."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from servers import seaweed, swift_server
from tiny_model import save_tiny_model

from reflux.components.storage import S3Settings, Store

SERVER = os.environ.get("REFLUX_TEST_S3", "seaweedfs")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """The argument's name for bytes: an archive holds the time it was made, and xdist's workers must agree on names."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a two-layer model and a byte-level tokenizer: all that a real one has, milliseconds a forward."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def empty_mlflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of MLflow with nothing in its tables, which take seconds to make: each module uses a copy."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Settings]:
    """Settings of a running S3 server with the bucket `reflux`: SeaweedFS, or what REFLUX_TEST_S3 names."""
    server = {"seaweedfs": seaweed, "swift": swift_server}[SERVER]
    with server.running(tmp_path_factory.mktemp(SERVER)) as settings:
        yield settings


@pytest.fixture
def atomic_create() -> None:
    """For tests of races, which not every server decides."""
    if SERVER == "swift":
        pytest.skip("Swift looks for the object before it takes the new one, so two creators at once can both succeed")


@pytest.fixture(params=["directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store; every promise about artifacts is tested on a directory and on a real S3 server."""
    if request.param == "directory":
        return Store.open(str(tmp_path / "store"))
    return Store.open(f"s3://{seaweed.BUCKET}/{uuid.uuid4().hex}", request.getfixturevalue("s3"))
