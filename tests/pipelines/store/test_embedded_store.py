"""The embedded store with the real server: who starts it, who stops it, and what a kill -9 leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import boto3
import pytest

from reflux.pipelines.store import embedded_store

pytestmark = pytest.mark.skipif(embedded_store.binary() is None, reason=embedded_store.why_no_binary())

USER = """
import sys
from pathlib import Path
from typing import Any
from reflux.pipelines.store import embedded_store
with embedded_store.running(Path(sys.argv[1])) as server:
    print(server.pid, server.endpoint, flush=True)
    sys.stdin.read()
"""


def user(folder: Path) -> tuple[subprocess.Popen[str], int]:
    """Another process that uses the store until its input closes, and the pid of the server it sees."""
    process = subprocess.Popen(
        [sys.executable, "-c", USER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline().split()[0])


def client(server: embedded_store.Server) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
    )


def test_the_last_user_stops_it(tmp_path: Path) -> None:
    with embedded_store.running(tmp_path) as server:
        client(server).put_object(Bucket=embedded_store.BUCKET, Key="a/b", Body=b"kept")
        other, pid = user(tmp_path)
        assert pid == server.pid, "the second command joins the running server"
    assert embedded_store.serving(tmp_path) == server, "it runs on for the second command"
    assert embedded_store.in_use(tmp_path)
    other.communicate("")
    assert other.returncode == 0
    assert embedded_store.serving(tmp_path) is None
    assert not embedded_store.in_use(tmp_path)
    with embedded_store.running(tmp_path) as again:
        assert client(again).get_object(Bucket=embedded_store.BUCKET, Key="a/b")["Body"].read() == b"kept"
        assert (again.access_key, again.secret_key) == (server.access_key, server.secret_key)


def test_a_killed_user_leaves_a_server_that_the_next_one_joins_and_stops(tmp_path: Path) -> None:
    other, pid = user(tmp_path)
    other.kill()
    other.communicate()
    left = embedded_store.serving(tmp_path)
    assert left is not None
    assert left.pid == pid
    with embedded_store.running(tmp_path) as server:
        assert server.pid == pid
    assert embedded_store.serving(tmp_path) is None
    assert not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


def test_a_killed_server_is_started_again(tmp_path: Path) -> None:
    with embedded_store.running(tmp_path) as server:
        client(server).put_object(Bucket=embedded_store.BUCKET, Key="a/b", Body=b"kept")
        os.kill(server.pid, signal.SIGKILL)
        with embedded_store.running(tmp_path) as again:
            assert again.pid != server.pid
            assert client(again).get_object(Bucket=embedded_store.BUCKET, Key="a/b")["Body"].read() == b"kept"


def test_what_nobody_uses_is_stopped_on_request(tmp_path: Path) -> None:
    other, _ = user(tmp_path)
    assert "still used" in embedded_store.release(tmp_path)
    other.kill()
    other.communicate()
    assert embedded_store.release(tmp_path) == "the store is stopped"
    assert embedded_store.serving(tmp_path) is None


def test_only_its_owner_can_read_the_key_and_only_loopback_is_served(tmp_path: Path) -> None:
    with embedded_store.running(tmp_path) as server:
        assert (tmp_path / "s3.json").stat().st_mode & 0o077 == 0
        assert server.endpoint.startswith("http://127.0.0.1:")
        arguments = Path(f"/proc/{server.pid}/cmdline").read_text() if sys.platform == "linux" else ""
        assert server.secret_key not in arguments
        if sys.platform == "linux":
            assert listening(server.pid) == {"127.0.0.1"}
    ports = json.loads((tmp_path / "server.json").read_text())["ports"]
    assert len(ports) == 10
    assert [left for port in ports for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock")] == []


def listening(pid: int) -> set[str]:
    """The addresses of the TCP sockets on which a process listens, from /proc (state 0A is LISTEN)."""
    inodes = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    words = [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
    return {".".join(str(byte) for byte in bytes.fromhex(word)[::-1]) for word in words}


def test_a_server_that_cannot_start_shows_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "weed"
    broken.write_text("#!/bin/sh\necho no such disk\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    started = time.monotonic()
    with (
        pytest.raises(embedded_store.StoreError, match=r"did not start(.|\n)*no such disk"),
        embedded_store.running(tmp_path / "s"),
    ):
        pass
    assert time.monotonic() - started < 10, "a process that ended is not waited for"


def test_a_full_disk_is_said_before_the_server_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = shutil.disk_usage(tmp_path)._replace(total=200 * 2**30, free=2 * 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    said = r"2\.00 of its 200\.0 GiB free; SeaweedFS writes nothing while less than 1% is: .*--data-dir"
    with pytest.raises(embedded_store.StoreError, match=said), embedded_store.running(tmp_path / "s"):
        pass
    assert embedded_store.serving(tmp_path / "s") is None
