"""A container engine of the tests' own: dockerd with its socket, its images and its processes in one folder."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import docker
from docker.errors import DockerException
from requests.exceptions import RequestException


@contextmanager
def running() -> Iterator[str]:
    """Its address, for DOCKER_HOST. Containers have the host's network: dockerd without iptables has no other."""
    folder = Path(tempfile.mkdtemp(prefix="reflux-dockerd-"))  # short: a socket's path may have 107 characters
    address = f"unix://{folder / 'd.sock'}"
    command = ["dockerd", f"--host={address}", f"--data-root={folder / 'data'}", f"--exec-root={folder / 'exec'}"]
    command += [f"--pidfile={folder / 'pid'}", "--iptables=false", "--ip6tables=false", "--bridge=none"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait(server, address, folder / "log")
        yield address
    finally:
        server.terminate()  # ends its containers and its containerd too
        server.wait(timeout=60)
        for line in Path("/proc/mounts").read_text().splitlines():  # it leaves the one of its network
            if (mount := line.split(" ")[1]).startswith(f"{folder}/"):
                subprocess.run(["umount", mount], check=True)
        shutil.rmtree(folder)


def _wait(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        with suppress(DockerException, RequestException):
            client = docker.DockerClient(base_url=address)
            client.ping()
            client.close()
            return
        time.sleep(0.1)
    raise RuntimeError(f"dockerd did not start (it needs root): {log.read_text(errors='replace')[-2000:]}")
