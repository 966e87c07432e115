"""`reflux report`: the table that scripts read, and the one that people read."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from finished_run import METRICS, ROW, TIMES, make

from reflux.pipelines import runs
from reflux.pipelines.__main__ import cli


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("data"))


def test_json_is_what_scripts_expect(run: Path) -> None:
    result = CliRunner().invoke(cli, ["report", str(run), "--json"])
    assert result.exit_code == 0, result.output
    table = [{"scheme": row["scheme"], **ROW, **TIMES} for row in METRICS["table"]]
    assert json.loads(result.stdout) == {"run": "demo-1", "verdict": "pass", "table": table}


def test_people_see_every_scheme_the_gates_and_the_verdict(run: Path) -> None:
    output = CliRunner().invoke(cli, ["report", "demo-1", "--data-dir", str(run.parents[1])]).output
    for text in ("fp32", "w4a4_distilled", "41.50", "policy match rate: 0.875 (>= 0.7)", "verdict: pass"):
        assert text in output


def test_an_unfinished_run_has_no_table(run: Path, tmp_path: Path) -> None:
    record = runs.read(run)
    folder = tmp_path / "runs" / "half"
    folder.mkdir(parents=True)
    for status in ("running", "failed"):
        runs.write(folder, runs.RunRecord(**{**vars(record), "status": status, "artifacts": {}, "root": ""}))
        for command in ("report", "lineage"):
            result = CliRunner().invoke(cli, [command, str(folder)])
            assert result.exit_code == 2
            assert f"is {status}, not finished" in result.output
            assert ("the command that began it goes on" in result.output) == (status == "running")


def test_a_store_that_moved_is_named_with_the_option_that_every_message_names(run: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(run.parents[1], data)
    record = runs.read(data / "runs" / run.name)
    elsewhere = shutil.move(data / "objects-of-runs", tmp_path / "elsewhere")
    runs.write(data / "runs" / run.name, replace(record, store=replace(record.store, uri=str(data / "gone"))))
    arguments = ["report", run.name, "--data-dir", str(data), "--json"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2
    assert "name the right one with --store" in result.output
    found = CliRunner().invoke(cli, [*arguments, "--store", str(elsewhere)])
    assert found.exit_code == 0, found.output
    assert len(json.loads(found.stdout)["table"]) == len(METRICS["table"])
    assert "--endpoint belongs to" in CliRunner().invoke(cli, [*arguments, "--endpoint", "http://x"]).output


def test_what_a_store_holds_and_for_whom(run: Path) -> None:
    store = runs.read(run).store.uri
    arguments = ["store", "du", "--store", store, "--data-dir", str(run.parents[1])]
    rows = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).stdout)
    assert len(rows) == 6
    assert all(row["runs"] == ["demo-1"] and row["committed"] for row in rows)
    files = [path for path in Path(store).rglob("*") if path.is_file()]
    assert sum(row["bytes"] for row in rows) == sum(path.stat().st_size for path in files)
    assert sum(row["objects"] for row in rows) == len(files)
    assert "demo-1" in CliRunner().invoke(cli, arguments).output


@pytest.mark.parametrize("command", ["report", "lineage"])
def test_a_record_without_a_stage_is_refused_by_name(run: Path, tmp_path: Path, command: str) -> None:
    record = runs.read(run)
    (tmp_path / "half").mkdir()
    artifacts = {stage: value for stage, value in record.artifacts.items() if stage != "calibrate"}
    runs.write(tmp_path / "half", runs.RunRecord(**{**vars(record), "artifacts": artifacts}))
    result = CliRunner().invoke(cli, [command, str(tmp_path / "half")])
    assert result.exit_code == 2
    assert "it names no artifact of calibrate" in result.output
