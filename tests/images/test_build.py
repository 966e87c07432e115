"""The programs around the Containerfiles, as they are called: by name, with their settings in the environment."""

from __future__ import annotations

import os
import runpy
import stat
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORDER = """#!/bin/sh
for argument; do echo "$argument"; done > "$0.arguments"
"""
SETTINGS = ("CONTAINER", "REGISTRY", "BASE_IMAGE", "WHEELHOUSE", "SOURCE_DATE_EPOCH")


def call(program: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key not in SETTINGS and not key.startswith("PIP_")}
    return subprocess.run(
        [sys.executable, ROOT / "images" / program, *arguments], env=clean | settings, capture_output=True, text=True
    )


@pytest.mark.parametrize("builder", ["docker", "podman", "buildah"])
def test_the_builder_is_told_everything(tmp_path: Path, builder: str) -> None:
    """A program that writes down its arguments stands in for the builder: they are all that is asked here."""
    program = tmp_path / builder
    program.write_text(RECORDER)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    done = call(
        "build.py", "gpu", CONTAINER=str(program), REGISTRY="registry.test/team/", BASE_IMAGE="base:1",
        PIP_INDEX_URL="index", SOURCE_DATE_EPOCH="86400",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    told = (tmp_path / f"{builder}.arguments").read_text().splitlines()
    assert told[0] == "build"
    assert told[-1] == str(ROOT)
    assert told[told.index("--file") + 1] == str(ROOT / "images/gpu/Containerfile")
    assert told[told.index("--tag") + 1].startswith("registry.test/team/reflux-python-gpu:")
    assert {"--build-arg=BASE_IMAGE=base:1", "--build-arg=PIP_INDEX_URL=index"} <= set(told)
    assert "--build-arg=CREATED=1970-01-02T00:00:00Z" in told
    assert ("--timestamp=86400" in told) == (builder != "docker")


@pytest.mark.parametrize("program", ["build.py", "lock.py"])
def test_an_unknown_image_is_refused(program: str) -> None:
    done = call(program, "tpu")
    assert done.returncode == 1
    assert "image: tpu is none of cpu, gpu, serve, mlflow" in done.stderr


def test_an_unknown_builder_is_refused() -> None:
    done = call("build.py", "cpu", CONTAINER="kaniko")
    assert done.returncode == 1
    assert "CONTAINER: 'kaniko' is none of docker, podman, buildah" in done.stderr


def test_the_wheelhouse_is_a_page_of_links(tmp_path: Path) -> None:
    (tmp_path / "one-1.0-py3-none-any.whl").write_bytes(b"wheel")
    with runpy.run_path(str(ROOT / "images/build.py"))["served"](tmp_path) as address:
        assert address.startswith("http://127.0.0.1:")
        assert b'href="one-1.0-py3-none-any.whl"' in urllib.request.urlopen(address).read()
        assert urllib.request.urlopen(f"{address}one-1.0-py3-none-any.whl").read() == b"wheel"
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(address)


def test_byte_code_outlives_a_layer_that_changes_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builders may set every file to one time; byte code compared by time would then be compiled at each start."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "imported_in_a_build.py"
    source.write_text("VALUE = 'compiled in the build'\n")
    runpy.run_path(str(ROOT / "images/install.py"))["precompile"](["imported_in_a_build"], tmp_path)
    source.write_text("VALUE = 'compiled at the start'\n")
    os.utime(source, (0, 0))
    shown = [sys.executable, "-c", "import imported_in_a_build as m; print(m.VALUE)"]
    assert subprocess.check_output(shown, cwd=tmp_path, text=True) == "compiled in the build\n"
