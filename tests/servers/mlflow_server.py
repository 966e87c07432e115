"""MLflow as the manifests run it: a server with PostgreSQL behind it and its artifacts in S3."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kustomized import containers, of_kind, overlay, pods

from reflux.components.storage import S3Settings


@contextmanager
def running(settings: S3Settings, artifacts: str) -> Iterator[str]:
    """Its URI. `artifacts` is the place in the store that the server writes to for its clients.

    Flags and variables are those of the local overlay's Deployment; where it listens, its addresses and its keys are
    this machine's.
    """
    (container,) = containers(pods(overlay("local"))["Deployment/mlflow"])
    given = of_kind(overlay("local"), "ConfigMap")["reflux-settings"]["data"]
    folder = Path(tempfile.mkdtemp(prefix="reflux-mlflow-"))
    try:
        with _postgres(folder / "postgres") as database:
            here = {"AWS_ENDPOINT_URL_S3": str(settings.endpoint), "uri": database}
            given = given | settings.env() | here | {"MLFLOW_ARTIFACTS_DESTINATION": artifacts}
            environment = {each["name"]: each.get("value") or given[_key(each)] for each in container["env"]}
            with _server(folder, [*container["command"], *container["args"]], environment) as uri:
                yield uri
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _key(variable: dict[str, Any]) -> str:
    (reference,) = variable["valueFrom"].values()
    return str(reference["key"])


@contextmanager
def _server(folder: Path, command: list[str], environment: dict[str, str]) -> Iterator[str]:
    port = _free_port()
    here = {"--host": "127.0.0.1", "--port": str(port), "--workers": "1"}
    program, *flags = command
    kept = [flag for flag in flags if flag.partition("=")[0] not in here]
    assert len(kept) == len(flags) - len(here), f"flags of the Deployment: {flags}"
    command = [
        str(Path(sys.executable).with_name(program)),
        *kept,
        *(f"{name}={value}" for name, value in here.items()),
    ]
    around = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "MLFLOW_"))}
    uri = f"http://127.0.0.1:{port}"

    def healthy() -> bool:
        with urllib.request.urlopen(f"{uri}/health", timeout=2) as answer:
            return bool(answer.status == 200)

    with _process(command, folder / "mlflow.log", healthy, environment={**around, **environment}):
        yield uri


@contextmanager
def _postgres(folder: Path) -> Iterator[str]:
    """An empty database's URI. PostgreSQL refuses to run as root, so then it runs as its own user."""
    folder.parent.chmod(0o755)
    folder.mkdir()
    user = None
    if os.geteuid() == 0:
        user = "postgres"
        shutil.chown(folder, user, user)
    programs = max(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    setup = [str(programs / "initdb"), f"--pgdata={folder / 'data'}", "--username=mlflow", "--auth=trust", "--no-sync"]
    subprocess.run(setup, check=True, capture_output=True, user=user, group=user, cwd=folder)
    port = _free_port()
    command = [str(programs / "postgres"), "-D", str(folder / "data"), "-p", str(port), "-F"]
    command += ["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]

    def listening() -> bool:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            return True

    with _process(command, folder / "log", listening, user=user):
        yield f"postgresql+psycopg2://mlflow@127.0.0.1:{port}/postgres"


@contextmanager
def _process(
    command: list[str], log: Path, ready: Callable[[], bool], *, environment: dict[str, str] | None = None,
    user: str | None = None,
) -> Iterator[None]:  # fmt: skip
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, env=environment, user=user, group=user, cwd=log.parent
        )
    try:
        _wait(process, ready, log)
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], ready: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if ready():
                return
        except OSError:  # not listening yet
            pass
        time.sleep(0.1)
    raise RuntimeError(f"{log.name} did not start: {log.read_text(errors='replace')[-2000:]}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
