"""A server on which the toy pipeline is registered, for tests of schedules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from scheduled_tea import reach
from servers.kfp_api_contract import Contract, serving
from toy_stages.pipeline import tea_party

from reflux.pipelines.compile import compile_to_text
from reflux.pipelines.kubeflow import registration
from reflux.pipelines.kubeflow.package import Package


@pytest.fixture(scope="module")
def package() -> Package:
    return Package(text=compile_to_text(tea_party(note="mild", minutes=7)))


@pytest.fixture
def contract(package: Package) -> Iterator[Contract]:
    """A server on which the pipeline `tea` is registered."""
    with serving() as server:
        registration.prepare(reach(server), pipeline="tea", package=package, experiment="reflux")
        server.asked.clear()
        yield server
