"""The same stage by KFP's executor input and by flags: same artifact, reuse, one clear line for a wrong input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reflux.components import __main__ as entry
from reflux.components import calls, environment
from reflux.components.artifacts import Artifact
from reflux.components.kubeflow import kfp_executor
from reflux.components.storage import Store

TESTS = Path(__file__).parents[1]


def brew_flags(root: Path, *more: str) -> list[str]:
    leaves = root / "leaves.txt"
    leaves.write_text("assam")
    at = ["--store", str(root / "store"), "--run", "r1", "--out-tea", str(root / "tea.json")]
    return ["toy_stages.brew", *at, "--leaves", str(leaves), *more]


def executor_input(root: Path, parameters: dict[str, Any], inputs: dict[str, Path], outputs: list[str]) -> str:
    def artifacts(places: dict[str, Path]) -> dict[str, Any]:
        return {
            name: {"artifacts": [{"name": name, "uri": str(path), "metadata": {}}]} for name, path in places.items()
        }

    document = {
        "inputs": {"parameterValues": parameters, "artifacts": artifacts(inputs)},
        "outputs": {
            "artifacts": artifacts({name: root / "task" / name for name in outputs}),
            "outputFile": str(root / "task" / "executor_output.json"),
        },
    }
    return json.dumps(document)


def as_process(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "reflux.components", *arguments],
        env={**os.environ, "PYTHONPATH": str(TESTS), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(autouse=True)
def _untracked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("REFLUX_PARENT_PID", raising=False)


def test_flags_and_executor_input_make_one_artifact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(brew_flags(tmp_path, "--minutes", "5")) == 0
    by_flags = (tmp_path / "tea.json").read_bytes()
    parameters = {"store": str(tmp_path / "store"), "run": "r2", "leaves": str(tmp_path / "leaves.txt"), "minutes": 5.0}
    assert entry.main(["toy_stages.brew", "--executor-input", executor_input(tmp_path, parameters, {}, ["tea"])]) == 0
    assert (tmp_path / "task" / "tea").read_bytes() == by_flags
    output = capsys.readouterr().out
    assert "tracking: off" in output
    assert "brew: made sha256:" in output
    assert "brew: reused sha256:" in output

    artifact = Artifact.load(Store.open(str(tmp_path / "store")), by_flags)
    assert artifact.file("tea.txt") == b"assam|5|"
    told = json.loads((tmp_path / "task" / "executor_output.json").read_text())
    (tea,) = told["artifacts"]["tea"]["artifacts"]
    assert told["parameterValues"] == {}
    assert tea["uri"] == str(tmp_path / "task" / "tea")
    assert tea["metadata"] == {"digest": artifact.digest, "key": artifact.key, "stage": "brew", "reused": "yes"}


def test_changed_content_behind_one_path_is_made_again(tmp_path: Path) -> None:
    entry.main(brew_flags(tmp_path))
    first = (tmp_path / "tea.json").read_bytes()
    flags = brew_flags(tmp_path)
    (tmp_path / "leaves.txt").write_text("darjeeling")
    entry.main(flags)
    assert (tmp_path / "tea.json").read_bytes() != first


def test_pages_are_served_from_the_artifact_also_when_reused(tmp_path: Path) -> None:
    entry.main(brew_flags(tmp_path))
    parameters = {"store": str(tmp_path / "store"), "run": "r", "cups": 2.0, "sizes": [1.0, 2.0], "sweet": True}
    text = executor_input(tmp_path, parameters, {"tea": tmp_path / "tea.json"}, ["cup", "report"])
    for _ in range(2):
        assert entry.main(["toy_stages.pour", "--executor-input", text]) == 0
        page = tmp_path / "task" / "report"
        assert page.read_text() == "<p>assam|3|</p>"
        page.unlink()


def test_what_kfps_ui_shows_of_a_stage(tmp_path: Path) -> None:
    entry.main(brew_flags(tmp_path, "--note", "a | b `c` <b>"))
    parameters = {"store": str(tmp_path / "store"), "run": "r"}
    text = executor_input(tmp_path, parameters, {"tea": tmp_path / "tea.json"}, ["cup", "metrics", "summary"])
    assert entry.main(["toy_stages.pour", "--executor-input", text]) == 0
    told = json.loads((tmp_path / "task" / "executor_output.json").read_text())["artifacts"]
    numbers = {"poured": 2.0, "verdict.pass": 1.0}
    assert told["metrics"]["artifacts"][0]["metadata"] == numbers, "flat numbers: the launcher knows nothing else"
    assert json.loads((tmp_path / "task" / "metrics").read_text()) == numbers
    assert told["summary"]["artifacts"][0]["metadata"] == {}
    page = (tmp_path / "task" / "summary").read_text()
    assert page.startswith("# pour: made\n")
    digest = Artifact.load(Store.open(str(tmp_path / "store")), (tmp_path / "tea.json").read_bytes()).digest
    for line in (
        "| `poured` | `2` |",
        f"| `tea` | `brew` | `{digest}` |",
        "| `report.html` | `1` |",
        "| `cups` | `2` |",
        "| `verdict` | `pass` |",
    ):
        assert line in page
    entry.main(["toy_stages.pour", "--executor-input", text])
    assert (tmp_path / "task" / "summary").read_text().startswith("# pour: found in the store, not made again\n")

    by_hand = [*brew_flags(tmp_path, "--note", "a | b `c` <b>"), "--out-summary", str(tmp_path / "page.md")]
    assert entry.main(by_hand) == 0
    assert r"| `note` | `a \| b 'c' <b>` |" in (tmp_path / "page.md").read_text(), "a code span, and no end of a cell"


def test_a_run_without_a_name_has_that_of_its_job_and_overrides_are_laid_over(tmp_path: Path) -> None:
    brew = calls.load("toy_stages.brew")
    parameters = {"store": "s", "run": "", "job": "8f14", "minutes": 3.0}
    changes = {"overrides": {"brew": {"minutes": 10.0}, "pour": {"cups": 1.0}}}

    def call(**more: Any) -> calls.Call:
        return calls.parse(brew, ["--executor-input", executor_input(tmp_path, parameters | more, {}, ["tea"])])

    assert (call().run, call(run="mine").run) == ("8f14", "mine")
    assert (call().config.minutes, call(**changes).config.minutes) == (3, 10)
    with pytest.raises(ValueError, match=r"brew\.minutes: 10\.5 is not a whole number"):
        call(overrides={"brew": {"minutes": 10.5}})


def test_inputs_are_compared_with_the_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry.main(brew_flags(tmp_path))
    manifest = tmp_path / "tea.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"assam", b"ASSAM").replace(b"warmth", b"wormth"))
    flags = ["--store", str(tmp_path / "store"), "--run", "r", "--out-cup", str(tmp_path / "cup.json")]
    assert entry.main(["toy_stages.pour", *flags, "--tea", str(manifest)]) == 2
    assert capsys.readouterr().err.startswith("reflux pour: ")
    assert entry.main(["toy_stages.pour", *flags, "--tea", str(tmp_path / "none.json")]) == 2
    assert "input tea: no manifest there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "0"], "reflux brew: brew.minutes 0: must be at least 1"),
        (["--fault", "value"], "reflux brew: brew.leaves: too old, from 2 to 5 days are allowed"),
        (["--leaves", "/nowhere"], "reflux brew: leaves: source '/nowhere': no such file or folder"),
        (["--store", "ftp://x/y"], "reflux brew: store 'ftp://x/y': allowed are"),
        (["--run", ""], "reflux brew: run: must not be empty."),
    ],
)
def test_wrong_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert entry.main(brew_flags(tmp_path, *arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)


@pytest.mark.parametrize("program", ["toy_stages.brew", "prerequisites", "close_run"])
def test_an_image_of_another_version_than_the_pipelines_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setenv(environment.COMPILED_BY, "9.9.9")
    assert entry.main([program, *brew_flags(tmp_path)[1:]]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    said = f"image: holds reflux {environment.version()}, and the pipeline was compiled by 9.9.9; compile it with"
    assert line.startswith(f"reflux {program.rpartition('.')[2]}: {said}")
    assert not (tmp_path / "store").exists()


def test_unknown_stage_and_bad_executor_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["distil"]) == 2
    assert "did you mean distill?" in capsys.readouterr().err
    assert entry.main(["toy_stages.brew", "--executor-input", "{}"]) == 2
    assert "--executor-input: not KFP's executor input" in capsys.readouterr().err


def test_as_a_process(tmp_path: Path) -> None:
    failed = as_process(brew_flags(tmp_path, "--fault", "value"))
    assert failed.returncode == 2
    assert failed.stderr.splitlines() == ["reflux brew: brew.leaves: too old, from 2 to 5 days are allowed"]
    away = as_process(brew_flags(tmp_path, "--fault", "outage"))
    assert away.returncode == os.EX_TEMPFAIL
    assert away.stderr.splitlines() == ["reflux brew: store s3://pantry: no answer"]
    crashed = as_process(brew_flags(tmp_path, "--fault", "crash"))
    assert crashed.returncode == 1
    assert "Traceback" in crashed.stderr
    assert crashed.stderr.splitlines()[-1] == "reflux brew: RuntimeError: the pot broke"
    orphan = as_process(brew_flags(tmp_path), REFLUX_PARENT_PID="1")
    assert orphan.returncode == 1
    assert not (tmp_path / "tea.json").exists()


def test_help_needs_no_heavy_library() -> None:
    code = (
        "import sys; from reflux.components.__main__ import main\n"
        "try: main(['evaluate', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(bool({'kfp', 'torch', 'pyarrow', 'mlflow', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "--max-perplexity-ratio" in done.stdout


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("/root/run/task/traces", "/root/run/task/traces"),
        ("s3://bucket/a/traces", "/s3/bucket/a/traces"),
        ("minio://bucket/a/traces?endpoint=x", "/minio/bucket/a/traces"),
        ("gs://bucket/traces", "/gcs/bucket/traces"),
    ],
)
def test_local_path_of_an_artifact(uri: str, path: str) -> None:
    assert kfp_executor.local_path(uri) == Path(path)


def test_unmounted_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="hf://x"):
        kfp_executor.local_path("hf://x")
