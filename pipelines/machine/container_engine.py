"""dockerd, or podman behind the same API: is it there, has it the image, one container from its start to its end.

What is started here carries a label with the lock file of its run. The kernel drops that lock however the command ends,
so a container whose lock can be taken belongs to nobody, and the next command removes it (`remove_stale`).
"""

from __future__ import annotations

import codecs
import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import docker
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from requests.exceptions import RequestException
from urllib3.exceptions import HTTPError

from reflux.pipelines.machine.local_session import Ending

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container
    from docker.models.images import Image

LOCK_LABEL = "reflux.lock"
RUN_LABEL = "reflux.run"
STAGE_LABEL = "reflux.stage"
_PROBE = "probe"
_DEFAULT_SOCKET = "unix:///var/run/docker.sock"
_GRACE_S = 3  # for an interrupted stage to tell MLflow
_KILLED, _TERMINATED = 137, 143  # 128 + signal, as every engine reports them


class LostContainerError(Exception):
    """A container ended for a reason outside it: a kill or a removal. Running it again may succeed."""


@contextmanager
def connected() -> Iterator[DockerClient]:
    """A client of the engine that DOCKER_HOST names. ValueError if it does not answer."""
    where = os.environ.get("DOCKER_HOST", _DEFAULT_SOCKET)
    try:
        client = docker.from_env()
        client.ping()
    except (DockerException, RequestException) as error:
        raise ValueError(
            f"--runner docker: no container engine answers at {where} ({_said(error)}); "
            "start dockerd or podman, or name the socket with DOCKER_HOST=unix:///PATH"
        ) from None
    try:
        yield client
    finally:
        client.close()


def check_image(engine: DockerClient, name: str) -> None:
    """ValueError unless stages can run in the image. One that a registry has and this machine has not is pulled."""
    image = _found(engine, name)
    if image.attrs["Config"].get("Entrypoint"):
        raise ValueError(f"--image {name}: it has an ENTRYPOINT, to which KFP's command would be appended")
    said: list[str] = []
    program = ["python3", "-c", "import importlib.metadata as m; print(m.version('reflux'))"]
    probe = {"image": name, "command": program, "network_mode": "none", "labels": {LOCK_LABEL: _PROBE}}
    try:
        ending = run_to_end(engine, said.append, **probe)
    except LostContainerError as error:
        ending = Ending(code=_KILLED, cause=str(error))
    inside, here = said[-1] if said else "no output", version("reflux")
    if ending.code != 0:
        raise ValueError(f"--image {name}: reflux does not run in it ({ending.cause or inside})")
    if inside != here:
        raise ValueError(f"--image {name}: it holds reflux {inside}, this is {here}; build or name one that fits")


def run_to_end(engine: DockerClient, line: Callable[[str], None], **container: Any) -> Ending:
    """Create, start, follow, wait, remove. `line` gets every line of output. No container is left, whatever happens.

    LostContainerError if the container was killed or removed by somebody else.
    """
    try:
        created = engine.containers.create(**container)
    except (DockerException, RequestException) as error:
        return Ending(code=os.EX_TEMPFAIL, cause=f"no container could be made ({_said(error)})")
    try:
        created.start()
        for text in _lines(created.logs(stream=True, follow=True)):
            line(text)
        code = created.wait(timeout=None)["StatusCode"]
        created.reload()
        return _ending(code, created.attrs["State"], created.attrs["HostConfig"].get("Memory") or 0)
    except NotFound:
        raise LostContainerError("its container was removed by somebody else") from None
    except APIError as error:  # the command is no program, a mount is refused, …
        return Ending(code=os.EX_TEMPFAIL, cause=f"the container engine refuses ({_said(error)})")
    except (DockerException, HTTPError, OSError) as error:  # a stream that breaks off is raised as it comes
        return Ending(code=os.EX_TEMPFAIL, cause=f"the container engine does not answer any more ({_said(error)})")
    except BaseException:  # interrupted: Ctrl-C does not reach a container by itself
        with suppress(DockerException, RequestException):
            created.stop(timeout=_GRACE_S)
        raise
    finally:
        _remove(created)


def remove_stale(engine: DockerClient, own_lock: Path) -> int:
    """Remove what killed commands left: containers of `own_lock`, and those whose lock nobody holds. How many."""
    labelled = engine.containers.list(all=True, filters={"label": LOCK_LABEL}, ignore_removed=True)
    stale = [container for container in labelled if _is_stale(container, own_lock)]
    for container in stale:
        _remove(container)
    return len(stale)


def _found(engine: DockerClient, name: str) -> Image:
    with suppress(ImageNotFound):
        return engine.images.get(name)
    if "/" not in name:
        raise ValueError(f"--image {name}: not on this machine; `make image-cpu` builds it, --image names another")
    click.echo(f"pulling {name}")
    try:
        return engine.images.pull(name)  # without a tag, latest
    except (DockerException, RequestException) as error:
        raise ValueError(f"--image {name}: not on this machine, and it cannot be pulled ({_said(error)})") from None


def _ending(code: int, state: dict[str, Any], memory_limit: int) -> Ending:
    if state.get("OOMKilled"):
        limit = f"its limit of {memory_limit / 2**30:.1f} GiB" if memory_limit else "what the machine has"
        return Ending(code=code, cause=f"out of memory: it needed more than {limit}")
    if code == _KILLED:
        raise LostContainerError("killed by SIGKILL (exit 137: by hand, or because the machine ran out of memory)")
    if code == _TERMINATED:
        raise LostContainerError("ended by SIGTERM (exit 143: by hand, or as the machine shuts down)")
    return Ending(code=code)


def _remove(container: Container) -> None:
    with suppress(DockerException, RequestException):
        container.remove(force=True, v=True)  # with its /tmp


def _is_stale(container: Container, own_lock: Path) -> bool:
    text = container.labels[LOCK_LABEL]
    if text == _PROBE:
        return container.status == "exited"
    lock = Path(text)
    return lock == own_lock or (lock.is_file() and not _held(lock))


def _held(lock: Path) -> bool:
    with lock.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """The engine cuts a stream anywhere, inside a character too."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pending = ""
    for chunk in chunks:
        *whole, pending = (pending + decoder.decode(chunk)).split("\n")
        yield from (text.rstrip("\r") for text in whole)
    if pending:
        yield pending


def _said(error: Exception) -> str:
    text = error.explanation if isinstance(error, APIError) and error.explanation else str(error)
    return " ".join(str(text).split())[:300]
