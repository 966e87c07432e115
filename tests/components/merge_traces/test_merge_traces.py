"""Traces that several pods collected are, row by row, those of one, and one artifact over the objects of the parts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from stage_writers import writer_for

from reflux.components import __main__ as entry
from reflux.components import artifacts, declare, progress
from reflux.components.artifacts import Artifact, ArtifactError
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.collect_traces.stage import run
from reflux.components.merge_traces.config import MergeTracesConfig
from reflux.components.provenance import from_bytes, to_bytes
from reflux.components.storage import Store
from reflux.pipelines.__main__ import cli
from reflux.pipelines.store import garbage, inventory

PARTS = ("1/3", "2/3", "3/3")


@pytest.fixture(autouse=True)
def _untracked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("REFLUX_PARENT_PID", raising=False)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine prompts, in five batches of two, and a row that cannot be asked."""
    rows = [{"prompt_id": f"p{i}", "prompt": "Tell me about " + "sand " * i} for i in range(9)] + [{"prompt": ""}]
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def collect(tiny_model: Path, prompts: Path) -> Callable[..., Artifact]:
    def collect(store: Path, part: str = "", **options: Any) -> Artifact:
        config = CollectTracesConfig(
            teacher=str(tiny_model), prompts_uri=str(prompts), part=part,
            **{"max_new_tokens": 8, "batch_size": 2, "attention_layers": [1]} | options,
        )  # fmt: skip
        writer = writer_for(store, "collect_traces", config)
        return writer.existing() or writer.commit(run(config, traces=writer))

    return collect


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def parts(collect: Callable[..., Artifact], store: Path) -> list[Artifact]:
    return [collect(store, part) for part in PARTS]


def merge(store: Path, parts: list[Artifact], folder: Path) -> int:
    """The program, on manifests in files, in the order of the parts; the exit code."""
    paths = [folder / f"part-{number}.json" for number in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        path.write_bytes(part.bytes)
    given = ["--parts", *map(str, paths), "--out-traces", str(folder / "traces.json")]
    return entry.main(["merge_traces", "--store", str(store), "--run", "r", *given])


def merged(store: Path, parts: list[Artifact], folder: Path) -> Artifact:
    assert merge(store, parts, folder) == 0
    return Artifact.load(Store.open(str(store)), (folder / "traces.json").read_bytes())


def test_equal_rows_in_one_pod_and_in_three(
    collect: Callable[..., Artifact], store: Path, parts: list[Artifact], tmp_path: Path
) -> None:
    whole, joined = collect(tmp_path / "whole"), merged(store, parts, tmp_path)
    assert [(s.name, s.sha256, s.rows) for s in joined.shards()] == [(s.name, s.sha256, s.rows) for s in whole.shards()]
    assert [len(part.shards("traces")) for part in parts] == [2, 2, 1]
    for name in ("traces", "attention", "composition", "rejected"):
        assert joined.table(name).equals(whole.table(name))
    assert joined.schema_metadata("traces") == whole.schema_metadata("traces")
    measured = {"tokens_per_second"}
    assert joined.metrics.keys() - measured == whole.metrics.keys() - measured
    assert {name: joined.metrics[name] for name in whole.metrics if name not in measured} == pytest.approx(
        {name: value for name, value in whole.metrics.items() if name not in measured}
    )


def test_one_artifact_without_a_copy(store: Path, parts: list[Artifact], tmp_path: Path) -> None:
    joined = merged(store, parts, tmp_path)
    folder = f"objects/merge_traces/{joined.key}"
    assert {Path(name).name for name in Store.open(str(store)).list(folder)} <= {"manifest.json", "attempt.json"}
    assert {parent.digest for parent in artifacts.parents(joined).values()} == {part.digest for part in parts}
    again = merged(store, parts[::-1], tmp_path)
    assert (again.key, again.digest) == (joined.key, joined.digest), "whatever order KFP collected them in"


def test_as_kfp_hands_a_list_over(store: Path, parts: list[Artifact], tmp_path: Path) -> None:
    given = []
    for number, part in enumerate(parts):
        (tmp_path / f"{number}.json").write_bytes(part.bytes)
        given.append({"uri": str(tmp_path / f"{number}.json"), "metadata": {}})
    shown = ("traces", "metrics", "summary")
    document = {
        "inputs": {
            "parameterValues": {"store": str(store), "run": "r", "job": "", "overrides": {}},
            "artifacts": {"parts": {"artifacts": given}},
        },
        "outputs": {
            "artifacts": {name: {"artifacts": [{"uri": str(tmp_path / name)}]} for name in shown},
            "outputFile": str(tmp_path / "output.json"),
        },
    }
    assert entry.main(["merge_traces", "--executor-input", json.dumps(document)]) == 0
    assert Artifact.load(Store.open(str(store)), (tmp_path / "traces").read_bytes()).stage == "merge_traces"


def test_what_it_is_made_of_is_kept_with_it(store: Path, parts: list[Artifact], tmp_path: Path) -> None:
    joined = merged(store, parts, tmp_path)
    held = inventory.take(Store.open(str(store)))
    assert set(held.items) == {(a.stage, a.key) for a in [joined, *parts]}
    later = replace(held, now_s=held.now_s + 1e6)
    kept = garbage.plan(later, {"a run": [(joined.stage, joined.key)]}, [], 1.0)
    assert {name for fate in kept.fates for name in fate.goes} <= {"attempt.json"}, "of the second who asked for it"
    assert all(fate.goes for fate in garbage.plan(later, {}, [], 1.0).fates)


def test_its_lineage_counts_and_names_every_object_once(collect: Callable[..., Artifact], tmp_path: Path) -> None:
    made = [collect(tmp_path / "own", part) for part in PARTS]
    joined = merged(tmp_path / "own", made, tmp_path)
    command = ["lineage", joined.digest, "--store", str(tmp_path / "own")]
    objects = {shard.object for artifact in [joined, *made] for shard in artifact.shards()}
    told = CliRunner().invoke(cli, command).output
    assert f"verified: 4 artifacts, {len(objects) + 4} objects, every digest matches" in told
    (victim, *_) = made[1].shards("traces")
    (tmp_path / "own" / victim.object).write_bytes(b"another")
    damaged = CliRunner().invoke(cli, command)
    assert (damaged.exit_code, damaged.output.count(victim.object)) == (1, 1)


def test_a_changed_or_missing_object_of_a_part_shows(collect: Callable[..., Artifact], tmp_path: Path) -> None:
    made = [collect(tmp_path / "own", part) for part in PARTS]
    joined = merged(tmp_path / "own", made, tmp_path)
    assert artifacts.verify(joined.store, joined.stage, joined.key) == []
    (victim, *_) = made[1].shards("traces")
    file = tmp_path / "own" / victim.object
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(ArtifactError, match=rf"{victim.object}: changed \(shard {victim.name}\)"):
        joined.table("traces")
    (problem,) = artifacts.verify(joined.store, joined.stage, joined.key)
    assert victim.object in problem
    file.unlink()
    writer = writer_for(tmp_path / "own", "merge_traces", MergeTracesConfig(), **artifacts.parents(joined))
    assert writer.existing() is None, "an artifact whose objects are not all there is not reused"


def test_objects_of_strangers_are_refused(store: Path, parts: list[Artifact], tmp_path: Path) -> None:
    alone = replace(merged(store, parts, tmp_path).record, parents={})
    with pytest.raises(ArtifactError, match="does not belong to this artifact"):
        from_bytes(to_bytes(alone), "forged")


def test_parts_of_different_wholes_are_refused(
    collect: Callable[..., Artifact], store: Path, parts: list[Artifact], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert merge(store, parts[:2], tmp_path) == 2
    assert "input parts: 2 were given, which are 1/3, 2/3; each of 1/2, 2/2 once" in capsys.readouterr().err
    assert merge(store, [parts[0], parts[1], parts[1]], tmp_path) == 2
    assert "which are 1/3, 2/3, 2/3; " in capsys.readouterr().err
    other = collect(store, "3/3", seed=1)
    assert merge(store, [*parts[:2], other], tmp_path) == 2
    assert "were made from other prompts or configurations" in capsys.readouterr().err


def test_without_parts_the_key_is_what_it_was_before_there_were_any(tiny_model: Path, prompts: Path) -> None:
    config = CollectTracesConfig(teacher=str(tiny_model), prompts_uri=str(prompts))
    assert "part" in declare.key_fields(config)
    assert "part" not in declare.hashed_fields(config)
    assert declare.hashed_fields(replace(config, part="1/2"))["part"] == "1/2"


@pytest.mark.parametrize("part", ["0/3", "4/3", "1", "a/b", "1/1", "01/3"])
def test_a_part_is_one_of_several(part: str) -> None:
    with pytest.raises(ValueError, match=f"collect_traces.part '{part}': "):
        CollectTracesConfig(teacher="t", prompts_uri="p", part=part)


def test_there_are_no_more_parts_than_batches(collect: Callable[..., Artifact], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="part 6/6: there are 5 batches of prompts, so at most as many parts"):
        collect(tmp_path, "6/6")


@pytest.mark.slow
def test_a_killed_part_goes_on_alone(
    collect: Callable[..., Artifact], tiny_model: Path, prompts: Path, tmp_path: Path
) -> None:
    options = {"max_new_tokens": 100, "batch_size": 1}
    command = [sys.executable, "-m", "reflux.components", "collect_traces", "--store", str(tmp_path / "killed"),
               "--run", "kill", "--teacher", str(tiny_model), "--prompts-uri", str(prompts), "--part", "2/2",
               "--attention-layers", "1", "--out-traces", str(tmp_path / "traces.json")]  # fmt: skip
    command += [text for name, value in options.items() for text in (declare.flag(name), str(value))]
    environment = os.environ | {"MLFLOW_TRACKING_URI": "", "OMP_NUM_THREADS": "1", "REFLUX_PROGRESS": "json"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as killed:
        assert killed.stdout is not None
        next(line for line in killed.stdout if (seen := progress.parse(line)) and seen.done >= 2)
        killed.send_signal(signal.SIGKILL)
    assert not (tmp_path / "traces.json").exists()
    resumed = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    assert '"done": 0' not in resumed.stdout
    assert resumed.stdout.endswith(f"{collect(tmp_path / 'quiet', '2/2', **options).digest}\n")
