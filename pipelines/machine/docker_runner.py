"""Stages as containers of this machine's engine: dockerd, or podman's socket through DOCKER_HOST.

kfp.local's DockerRunner does it, but its `run_docker_container` reports a container that failed as a success when the
container is gone before its exit code is asked for (it creates with auto_remove). So this one function is replaced.
Ours follows the output line by line for the session, keeps the container until its end is known, and starts a stage
again that was killed from outside, as a cluster's retry policy would: it goes on from its checkpoint.

This is an internal of kfp and changes with its versions: its test (test_docker_runner.py) pins what is used here.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docker.errors import DockerException
from docker.types import Mount
from docker.utils import parse_bytes
from kfp import local
from kfp.local import docker_task_handler

from reflux.components.declare import IMAGE
from reflux.pipelines.machine import container_engine
from reflux.pipelines.machine.container_engine import LOCK_LABEL, RUN_LABEL, STAGE_LABEL, LostContainerError
from reflux.pipelines.machine.container_mounts import View
from reflux.pipelines.machine.local_session import Ending, Runner, Session

if TYPE_CHECKING:
    from docker import DockerClient


@dataclass(frozen=True, kw_only=True)
class Containers:
    """How stages run in containers, as a person chooses it."""

    image: str = IMAGE
    network: str = "host"
    """Name of a network of the engine. Only `host` reaches servers on this machine's loopback interface."""
    retries: int = 1
    """How often a stage is started again whose container was killed or removed from outside."""
    memory: str = ""
    """Limit for each container, e.g. 8g. "" is none."""

    def __post_init__(self) -> None:
        try:
            parse_bytes(self.memory or 0)
        except DockerException:
            raise ValueError(f"--memory {self.memory!r}: a number with b, k, m or g is allowed, e.g. 8g") from None


def check(containers: Containers) -> None:
    """ValueError unless the engine answers and stages can run in the image."""
    with container_engine.connected() as engine:
        container_engine.check_image(engine, containers.image)


def in_containers(containers: Containers, view: View, *, run: str, lock: Path) -> Runner:
    """`lock` is the file that this command holds as long as it lives; what earlier commands left is removed first."""

    @contextmanager
    def runner(session: Session) -> Iterator[Any]:
        with container_engine.connected() as engine:
            container_engine.remove_stale(engine, lock)
            options = _options(engine, containers, view)
        labels = {RUN_LABEL: run, LOCK_LABEL: str(lock)}
        stock = docker_task_handler.run_docker_container
        docker_task_handler.run_docker_container = functools.partial(
            _run_docker_container, session, containers.retries, {**options, "labels": labels}
        )
        try:
            yield local.DockerRunner()
        finally:
            docker_task_handler.run_docker_container = stock

    return runner


def _run_docker_container(
    session: Session, retries: int, options: dict[str, Any], *, client: DockerClient, image: str, command: list[str],
    volumes: dict[str, Any], environment: Mapping[str, str] | None = None,
) -> int:  # fmt: skip
    """In the place of kfp's function: 0 if the stage succeeded. `environment` is that of the task in the pipeline."""

    def execute(stage: str) -> Ending:
        labels = {**options["labels"], STAGE_LABEL: stage}
        variables = {**(environment or {}), **options["environment"], **session.environment()}
        given = {**options, "labels": labels, "environment": variables, "volumes": volumes}
        for attempt in range(retries + 1):
            try:
                return container_engine.run_to_end(client, session.line, image=image, command=command, **given)
            except LostContainerError as error:
                if attempt == retries:
                    return Ending(code=137, cause=str(error))
                session.line(f"{error}; starting it again, {attempt + 1} of {retries}")
        raise AssertionError("unreachable")

    return 0 if session.carry_out(command, execute) else 1


def _options(engine: DockerClient, containers: Containers, view: View) -> dict[str, Any]:
    """How every stage's container is made: as little as it needs, and files that belong to whoever started it."""
    rootless = any("rootless" in option for option in engine.info().get("SecurityOptions") or [])
    mounts = [Mount(str(path), str(path.resolve()), "bind", read_only=not rw) for path, rw in view.writable.items()]
    scratch = Mount("/tmp", None, "volume")  # removed with its container; on disk, as checkpoints of large models need
    return {
        "environment": {**view.environment, "HOME": "/tmp", "USER": "reflux"},
        "mounts": [scratch, *mounts],
        "network_mode": containers.network,
        "user": "0:0" if rootless else f"{os.getuid()}:{os.getgid()}",  # rootless, the container's root is this user
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges", "label=disable"],
        "stop_signal": "SIGINT",  # what a stage understands as an interruption
        **({"mem_limit": containers.memory, "memswap_limit": containers.memory} if containers.memory else {}),
    }
