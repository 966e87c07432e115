"""What the tests with containers share: an engine, and the image of the stages as `make image-cpu` builds it."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen

import docker
import pytest
from docker import DockerClient
from servers import dockerd

from reflux.components.declare import IMAGE

ROOT = Path(__file__).parents[2]
BASE = "debian-python:bookworm"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def engine() -> Iterator[DockerClient]:
    """The engine that DOCKER_HOST names, or a dockerd of our own; DOCKER_HOST names it for every command under test."""
    with pytest.MonkeyPatch.context() as patch:
        if "DOCKER_HOST" in os.environ:
            yield docker.from_env()
            return
        with dockerd.running() as address:
            patch.setenv("DOCKER_HOST", address)
            yield docker.from_env()


@pytest.fixture(scope="session")
def image_build(engine: DockerClient) -> Iterator[Popen[str] | None]:
    """The making of reflux's own image for the CPU, of this source tree, on a base made from Debian's packages.

    It takes two minutes, in which other fixtures start. REFLUX_TEST_IMAGE names one that the engine has already, for
    whoever changes the tests and not the code in the image.
    """
    if "REFLUX_TEST_IMAGE" in os.environ:
        yield None
        return
    base = "" if engine.images.list(name=BASE) else f"images/base.sh {BASE} && "
    script = f"set -e; {base}make image-cpu BASE_IMAGE={BASE} WHEELHOUSE=1"
    process = Popen(["bash", "-c", script], cwd=ROOT, stdout=PIPE, stderr=STDOUT, text=True, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


@pytest.fixture(scope="module")
def image(image_build: Popen[str] | None) -> str:
    """The image's name, once it is made."""
    if image_build is None:
        return os.environ["REFLUX_TEST_IMAGE"]
    if image_build.stdout is not None and not image_build.stdout.closed:
        output = image_build.communicate()[0]
        assert image_build.returncode == 0, output
    return IMAGE


@pytest.fixture(scope="module")
def toy_image(engine: DockerClient, image: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with the toy stages in it."""
    return build(
        engine, tmp_path_factory.mktemp("toys"), f"FROM {image}\nCOPY toy_stages /toys/toy_stages\nENV PYTHONPATH=/toys"
    )


def build(engine: DockerClient, folder: Path, containerfile: str) -> str:
    """An image that a test needs; in its context are the toy stages."""
    shutil.copytree(ROOT / "tests" / "toy_stages", folder / "toy_stages", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "Dockerfile").write_text(containerfile)
    name = f"{folder.name.replace('_', '-')}-python:latest"
    engine.images.build(path=str(folder), tag=name, rm=True)
    return name
