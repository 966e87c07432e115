"""The command line: what it refuses and how, that it starts light, and what doctor and store say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from import_blocked import HEAVY, without

from reflux.pipelines.__main__ import cli
from reflux.pipelines.store import embedded_store


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)))


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["run", "--help"], ["submit", "--help"], ["schedule", "apply", "--help"], ["store", "status"]],
)
def test_help_needs_no_heavy_library(arguments: list[str], tmp_path: Path) -> None:
    arguments = [*arguments, "--data-dir", str(tmp_path)] if arguments[-1] == "status" else arguments
    done = without(HEAVY, *arguments)
    assert done.returncode == 0, done.stderr


def test_compile_needs_only_kfp(tmp_path: Path) -> None:
    done = without(HEAVY[:-1], "compile", "--recipe", "demo", "-o", str(tmp_path / "p.yaml"))
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "p.yaml").read_text()
    assert "evaluate" in text
    assert invoke("compile", "--recipe", "demo").output == text
    changed = invoke("compile", "--recipe", "demo", "--set", "distill.max_steps=2").output
    assert changed != text


def test_lint_reads_what_compile_wrote_and_what_others_did(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    assert invoke("compile", "--recipe", "demo", "--store", "s3://bucket/reflux", "-o", path).exit_code == 0
    assert "defaultValue: s3://bucket/reflux" in path.read_text()
    assert (invoke("lint", path).exit_code, invoke("lint", path).output) == (0, "")
    tags = invoke("lint", path, "--require-digests")
    assert tags.exit_code == 1
    assert "distill, image: reflux-python-cpu:" in tags.output
    path.write_text(path.read_text().replace("'{{$.pipeline_job_uuid}}'", "run-{{$.pipeline_job_uuid}}"))
    literal = invoke("lint", path)
    assert literal.exit_code == 1
    assert "distill, input job: run-{{$.pipeline_job_uuid}}; " in literal.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--recipe", "dmeo"], "did you mean demo"),
        (["run", "--recipe", "demo", "--set", "distil.max_steps=2"], "did you mean distill"),
        (["run", "--recipe", "demo", "--set", "distill.max_stepz=2"], "did you mean max_steps"),
        (["run", "--recipe", "demo", "--set", "distill.max_steps=many"], "'many' is not a whole number"),
        (["run", "--recipe", "demo", "--config", "/nowhere/c.json"], "cannot be read"),
        (["run", "--recipe", "demo", "--image", "python-mine"], "--image belongs to --runner docker"),
        (["run", "--recipe", "demo", "--runner", "docker", "--memory", "much"], "--memory 'much': a number"),
        (["run", "--recipe", "demo", "--store", "gs://bucket"], "allowed are"),
        (["run", "--recipe", "demo", "--store", "s3://"], "no bucket"),
        (["run", "--recipe", "demo", "--store", ""], "--store: is empty"),
        (["run", "--recipe", "demo", "--set", f"distill.seed={2**60}"], "distill.seed: 1152921504606846976 is beyond"),
        (["run", "--recipe", "demo", "--endpoint", "http://x"], "--endpoint belongs to --store s3://"),
        (["compile", "--recipe", "demo", "--set", "evaluate.windows=0"], "evaluate.windows 0: must be at least 1"),
        (["report", "no-such-run"], "no such folder"),
        (["lineage", "no-such-run"], "no such folder"),
        (["run", "--recipe", "demo", "--data-dir", "/dev/null/data"], "--data-dir /dev/null/data: cannot be written"),
        (["store", "start", "--data-dir", "/dev/null/data"], "--data-dir /dev/null/data: cannot be written"),
        (["compile", "--recipe", "demo", "--require-digests"], "a tag is a name that moves"),
        (["lint", __file__], "not a KFP specification: "),
        (["lint", "/nowhere/p.yaml"], "/nowhere/p.yaml: cannot be read"),
        (["compile", "--recipe", "demo", "-o", "no/p.yaml"], "--output no/p.yaml: there is no folder no"),
        (["compile", "--recipe", "demo", "-o", "/dev/null/p.yaml"], "--output /dev/null/p.yaml: cannot be written"),
    ],
)
def test_wrong_input_is_one_clear_line_and_exit_code_2(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert not list(tmp_path.iterdir()), "nothing was begun"


def test_doctor_says_what_is_wrong_and_how_to_mend_it(tmp_path: Path) -> None:
    healthy = invoke("doctor", "--store", tmp_path / "store", "--data-dir", tmp_path / "data")
    for check in ("python", "packages", "torch", "memory", "disk", "weed", "teacher", "store", "mlflow"):
        assert any(line.split()[1] == check for line in healthy.output.splitlines()), healthy.output
    (mlflow,) = [line for line in healthy.output.splitlines() if line.split()[1] == "mlflow"]
    assert mlflow.startswith("ok"), mlflow
    (tmp_path / "file").write_text("")
    broken = invoke("doctor", "--store", tmp_path / "file" / "store", "--data-dir", tmp_path / "data")
    assert broken.exit_code == 1
    (line,) = [line for line in broken.output.splitlines() if line.split()[1] == "store"]
    assert line.startswith("fail")
    assert str(tmp_path / "file") in line
    unwritable = invoke("doctor", "--data-dir", "/dev/null/data").output.splitlines()
    for check in ("store", "mlflow") if embedded_store.binary() else ("mlflow",):
        (line,) = [line for line in unwritable if line.split()[1] == check]
        assert line.startswith("fail"), line
        assert "--data-dir /dev/null/data: cannot be written (Not a directory)" in line


@pytest.mark.skipif(embedded_store.binary() is None, reason=embedded_store.why_no_binary())
def test_store_start_status_stop(tmp_path: Path) -> None:
    data = ["--data-dir", str(tmp_path)]
    assert "stopped" in invoke("store", "status", *data).output
    keeper = subprocess.Popen(
        [sys.executable, "-m", "reflux.pipelines", "store", "start", *data], stdout=subprocess.PIPE, text=True
    )
    try:
        assert keeper.stdout is not None
        endpoint = keeper.stdout.readline().strip()
        assert endpoint.startswith("endpoint: http://127.0.0.1:")
        assert endpoint.removeprefix("endpoint: ") in invoke("store", "status", *data).output
        assert "already kept running" in invoke("store", "start", *data).output
        assert invoke("store", "du", *data).output.endswith("0.0 kB in 0 artifacts\n")
        assert invoke("store", "stop", *data).output == "the store is stopped\n"
        assert keeper.wait(timeout=30) == 128 + signal.SIGTERM
    finally:
        if keeper.poll() is None:
            os.kill(keeper.pid, signal.SIGTERM)
            keeper.wait()
    assert "stopped" in invoke("store", "status", *data).output
