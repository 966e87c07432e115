"""A second S3 server for the storage tests, started by them: OpenStack Swift with its s3api, on free loopback ports.

It is stricter than SeaweedFS in some things and looser in others, so it shows what leans on one server. Its programs
live in an environment of their own (eventlet patches what it imports), made by pip on first use.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from reflux.components.storage import S3Settings

PACKAGE = "swift==2.38.3"
BUCKET = "reflux"
_PARTS = ("account", "container", "object")
# swift reads this file at import, from a fixed place in /etc: here from the test's own folder
_LAUNCH = (
    "import sys, swift.common.utils as u; u.SWIFT_CONF_FILE = sys.argv[3]; "
    "from swift.common.wsgi import run_wsgi; sys.exit(run_wsgi(sys.argv[1], sys.argv[2]))"
)
_RING = """
import sys
from swift.common.ring import RingBuilder
name, port, folder = sys.argv[1:]
ring = RingBuilder(4, 1, 0)
ring.add_dev({"region": 1, "zone": 1, "ip": "127.0.0.1", "port": int(port), "device": "disk", "weight": 1.0})
ring.rebalance()
ring.get_ring().save(f"{folder}/{name}.ring.gz")
"""
_PROXY = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
swift_dir = {folder}
workers = 0
[pipeline:main]
pipeline = catch_errors cache s3api tempauth slo dlo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
allow_account_management = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:{memcache}
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
[filter:slo]
use = egg:swift#slo
[filter:dlo]
use = egg:swift#dlo
"""
_PART = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
swift_dir = {folder}
devices = {folder}/devices
mount_check = false
workers = 0
[pipeline:main]
pipeline = {part}-server
[app:{part}-server]
use = egg:swift#{part}
"""


@contextmanager
def running(folder: Path) -> Iterator[S3Settings]:
    """Settings of a server that has the bucket; it is killed at the end."""
    python = _installed(folder / "environment")
    (folder / "devices" / "disk").mkdir(parents=True)
    (folder / "swift.conf").write_text(
        "[swift-hash]\nswift_hash_path_suffix = reflux\n[storage-policy:0]\nname = one\ndefault = yes\n"
    )
    *ports, port, nobody = _free_ports(len(_PARTS) + 2)
    with ExitStack() as servers:
        for part, part_port in zip(_PARTS, ports, strict=True):
            subprocess.run([python, "-c", _RING, part, str(part_port), str(folder)], check=True)
            _serve(servers, python, folder, f"{part}-server", _PART.format(part=part, port=part_port, folder=folder))
        _serve(servers, python, folder, "proxy-server", _PROXY.format(port=port, folder=folder, memcache=nobody))
        settings = S3Settings(endpoint=f"http://127.0.0.1:{port}", access_key="test:tester", secret_key="testing")
        _make_bucket(settings, folder)
        yield settings


def _installed(environment: Path) -> Path:
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    subprocess.run([*pip, PACKAGE, "setuptools<81"], check=True, stdout=sys.stderr)  # its plug-ins need pkg_resources
    return python


def _serve(servers: ExitStack, python: Path, folder: Path, name: str, configuration: str) -> None:
    path = folder / f"{name}.conf"
    path.write_text(configuration)
    log = servers.enter_context((folder / f"{name}.log").open("wb"))
    command = [str(python), "-c", _LAUNCH, str(path), name, str(folder / "swift.conf")]
    server = subprocess.Popen(command, stdout=log, stderr=log)
    servers.callback(server.wait)
    servers.callback(server.kill)


def _make_bucket(settings: S3Settings, folder: Path) -> None:
    config = Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1})
    client = boto3.client("s3", **settings.boto3_options(), config=config)
    deadline = time.monotonic() + 60
    while True:
        try:
            client.create_bucket(Bucket=BUCKET)
            return
        except (BotoCoreError, ClientError) as error:
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text()[-800:] for path in folder.glob("*.log"))
                raise RuntimeError(f"swift does not answer ({error}):\n{logs}") from error
            time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
