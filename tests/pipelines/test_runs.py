"""Folders of runs: which one a command works in, and that two commands never share one."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from reflux.pipelines import runs
from reflux.pipelines.store import stores

RECORD = runs.RunRecord(
    run="demo-1", recipe="demo", store=stores.StoreRef(kind="directory", uri="/s"), configs={"distill": {"seed": 0}},
    config_digest="sha256:a",
)  # fmt: skip
WORKER = """
import sys, time
from pathlib import Path
from reflux.pipelines import runs
from reflux.pipelines.store import stores
with runs.claimed(Path(sys.argv[1]), "demo", "sha256:a") as folder:
    store = stores.StoreRef(kind="directory", uri="/s")
    record = runs.RunRecord(run=folder.name, recipe="demo", store=store, configs={}, config_digest="sha256:a")
    runs.write(folder, record)
    print(folder.name, flush=True)
    time.sleep(60)
"""


def begun(data_dir: Path, digest: str = "sha256:a", name: str = "", status: str = "running") -> str:
    """A command that begins, writes its record and ends with the given status."""
    with runs.claimed(data_dir, "demo", digest, name) as folder:
        runs.write(folder, replace(RECORD, run=folder.name, config_digest=digest, status=status))
        return folder.name


def test_a_record_survives_the_file(tmp_path: Path) -> None:
    runs.write(tmp_path, RECORD)
    assert runs.read(tmp_path) == RECORD
    (tmp_path / "run.json").write_text('{"run": 1')
    with pytest.raises(ValueError, match=r"run.json: cannot be read"):
        runs.read(tmp_path)


def test_one_digest_is_one_recipe_in_one_store() -> None:
    same = runs.config_digest("demo", {"distill": {"seed": 0}}, RECORD.store)
    assert same == runs.config_digest("demo", {"distill": {"seed": 0}}, replace(RECORD.store))
    others = {
        runs.config_digest("other", {"distill": {"seed": 0}}, RECORD.store),
        runs.config_digest("demo", {"distill": {"seed": 1}}, RECORD.store),
        runs.config_digest("demo", {"distill": {"seed": 0}}, replace(RECORD.store, uri="/elsewhere")),
    }
    assert len(others | {same}) == 4


@pytest.mark.parametrize("status", ["running", "failed"])
def test_the_same_command_continues_an_unfinished_run(tmp_path: Path, status: str) -> None:
    first = begun(tmp_path, status=status)
    assert begun(tmp_path, digest="sha256:b", status="finished") != first
    assert begun(tmp_path, status="finished") == first
    assert begun(tmp_path) != first, "a finished run is not touched again"


def test_a_killed_command_is_continued_and_a_living_one_is_not(tmp_path: Path) -> None:
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    busy = worker.stdout.readline().strip()
    try:
        assert begun(tmp_path, status="finished") != busy
        with pytest.raises(ValueError, match="another command is working on it"):
            begun(tmp_path, name=busy)
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.communicate()
    assert begun(tmp_path) == busy


def test_a_named_run(tmp_path: Path) -> None:
    assert begun(tmp_path, name="mine", status="finished") == "mine"
    assert begun(tmp_path, name="mine") == "mine"
    with pytest.raises(ValueError, match="another configuration"):
        begun(tmp_path, digest="sha256:b", name="mine")
    with pytest.raises(ValueError, match="letters, digits"):
        runs.check_name("../mine")


def test_a_damaged_record_hinders_nobody(tmp_path: Path) -> None:
    damaged = begun(tmp_path)
    (tmp_path / "runs" / damaged / "run.json").write_text("")
    assert begun(tmp_path) != damaged


def test_find_by_path_or_name_and_help_otherwise(tmp_path: Path) -> None:
    name = begun(tmp_path)
    assert runs.find(name, tmp_path) == runs.find(str(tmp_path / "runs" / name), Path("nowhere"))
    with pytest.raises(ValueError, match=f"newest: {name}"):
        runs.find("other", tmp_path)
