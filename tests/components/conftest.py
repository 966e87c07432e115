"""Both kinds of store: every promise about artifacts is tested on a directory and on a real S3 server."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import seaweed

from reflux.components.storage import S3Settings, Store


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Settings]:
    """Settings of a running S3 server with the bucket `reflux`."""
    with seaweed.running(tmp_path_factory.mktemp("seaweed")) as settings:
        yield settings


@pytest.fixture(params=["directory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store."""
    if request.param == "directory":
        return Store.open(str(tmp_path / "store"))
    return Store.open(f"s3://{seaweed.BUCKET}/{uuid.uuid4().hex}", request.getfixturevalue("s3"))
