"""Lineage from manifests alone: an intact chain verifies, and any single changed byte is named."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from finished_run import PARENTS, make

from reflux.components.provenance import from_bytes, to_bytes
from reflux.pipelines import runs
from reflux.pipelines.__main__ import cli


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("data"))


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """A copy of the run and of its store, to be damaged."""
    shutil.copytree(original.parents[1], tmp_path / "data")
    folder = tmp_path / "data" / "runs" / original.name
    record = runs.read(original)
    store = replace(record.store, uri=str(tmp_path / "data" / "objects-of-runs"))
    digest = runs.config_digest(record.recipe, record.configs, store)
    runs.write(folder, replace(record, store=store, config_digest=digest))
    (folder / "bundle" / "store.json").write_text(json.dumps(store.to_json()))
    return folder


def lineage(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["lineage", *map(str, arguments)])


def change_a_byte(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_an_intact_run_and_bundle_verify(original: Path) -> None:
    record = runs.read(original)
    result = lineage(original, "--json", "--expect", record.root)
    assert result.exit_code == 0, result.output
    chain = json.loads(result.stdout)
    assert chain["verified"]
    assert chain["root"] == record.root
    assert sorted(node["stage"] for node in chain["artifacts"]) == sorted(PARENTS)
    by_stage = {node["stage"]: node for node in chain["artifacts"]}
    for stage, parents in PARENTS.items():
        assert {name: parent["stage"] for name, parent in by_stage[stage]["parents"].items()} == parents
        assert by_stage[stage]["digest"] == record.artifacts[stage]["digest"]
    assert by_stage["collect_traces"]["sources"]["prompts_uri"]["uri"].endswith("prompts.jsonl")

    bundle = lineage(original / "bundle", "--json")
    assert bundle.exit_code == 0, bundle.output
    assert json.loads(bundle.stdout)["root"] == record.artifacts["calibrate"]["digest"]


def test_the_tree_shows_every_artifact_once(original: Path) -> None:
    result = lineage(original)
    assert result.exit_code == 0
    for stage in PARENTS:
        assert f"{stage} {runs.read(original).artifacts[stage]['digest'][:19]}" in result.output
    objects = [path for path in Path(runs.read(original).store.uri).rglob("*") if path.is_file()]
    assert f"verified: 6 artifacts, {len(objects)} objects, every digest matches" in result.output
    assert f"root: {runs.read(original).root}" in result.output


def test_a_name_is_found_in_the_data_folder(original: Path) -> None:
    assert lineage(original.name, "--data-dir", original.parents[1]).exit_code == 0


def test_every_changed_object_is_named(run: Path) -> None:
    """One byte at the start, the middle or the end of each object of the store, one at a time."""
    store = Path(runs.read(run).store.uri)
    objects = sorted(path for path in store.rglob("*") if path.is_file())
    assert len(objects) == 6 * 3 + 4 + 1
    for path in objects:
        size = path.stat().st_size
        for at in (0, size // 2, size - 1):
            change_a_byte(path, at)
            result = lineage(run)
            assert result.exit_code == 1, (path, at)
            assert str(path.relative_to(store)) in result.stderr, (path, at)
            change_a_byte(path, at)
    assert lineage(run).exit_code == 0


def test_every_changed_file_outside_the_store_is_named(run: Path) -> None:
    files = sorted(path for path in (run / "bundle").rglob("*") if path.is_file() and path.name != "store.json")
    assert len(files) == 4
    for path in [*files, run / "report.html", run / "profile.html"]:
        change_a_byte(path, path.stat().st_size // 2)
        targets = [run, run / "bundle"] if path.parent != run else [run]
        for target in targets:
            result = lineage(target)
            assert result.exit_code == 1, (path, target)
            assert str(path) in result.stderr, (path, target)
        change_a_byte(path, path.stat().st_size // 2)
    assert lineage(run).exit_code == 0


def test_a_file_that_nobody_recorded_is_named(run: Path) -> None:
    """A bundle ships code: what lies beside it must not go unnoticed."""
    extra = run / "bundle" / "runtime" / "sitecustomize.py"
    extra.parent.mkdir()
    extra.write_text("print('hello')")
    for target in (run, run / "bundle"):
        result = lineage(target)
        assert result.exit_code == 1
        assert f"{extra}: is not in the manifest" in result.stderr


@pytest.mark.parametrize("stage", ["calibrate", "distill"])
def test_a_record_that_points_elsewhere_is_named(run: Path, stage: str) -> None:
    record = runs.read(run)
    record.artifacts[stage]["key"] = "0" * 64
    runs.write(run, record)
    result = lineage(run)
    assert result.exit_code == 1
    assert f"the key of {stage}" in result.stderr


def test_a_bundle_whose_manifest_the_store_does_not_have_is_named(run: Path) -> None:
    """Its files and its manifest agree with each other, but not with the run."""
    other = make(run.parents[2] / "other", name="demo-2")
    (run / "bundle" / "model.safetensors").write_bytes(b"forged")
    manifest = from_bytes((other / "bundle" / "manifest.json").read_bytes(), "other")
    forged = hashlib.sha256(b"forged").hexdigest()
    shards = tuple(
        replace(shard, sha256=forged, object=shard.object.replace(shard.sha256, forged))
        if shard.name == "model.safetensors"
        else shard
        for shard in manifest.shards
    )
    (run / "bundle" / "manifest.json").write_bytes(to_bytes(replace(manifest, shards=shards)))
    result = lineage(run)
    assert result.exit_code == 1
    assert "is not the manifest in the store" in result.stderr


def test_a_later_field_that_nobody_set_stands_in_no_manifest(run: Path) -> None:
    change_record(run, "distill", kv_cache="full", rope_bits=16)
    assert lineage(run).exit_code == 0
    change_record(run, "distill", kv_cache="kivi4")
    assert "distill.kv_cache is recorded otherwise" in lineage(run).stderr


def test_a_changed_verdict_is_named(run: Path) -> None:
    runs.write(run, replace(runs.read(run), verdict="fail"))
    result = lineage(run)
    assert result.exit_code == 1
    assert "the verdict is pass, recorded is 'fail'" in result.stderr


def change_record(run: Path, stage: str, **values: object) -> None:
    """A record whose own digest fits, as somebody would write it who wants to be believed."""
    record = runs.read(run)
    record.configs[stage] |= values
    digest = runs.config_digest(record.recipe, record.configs, record.store)
    runs.write(run, replace(record, config_digest=digest))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": 1}, "collect_traces.seed is 0, recorded is 1"),
        ({"temperature": 0.7}, "collect_traces.temperature is recorded otherwise"),
        ({"prompts_uri": ""}, "collect_traces.prompts_uri is recorded otherwise"),
    ],
)
def test_a_recorded_configuration_that_was_not_used_is_named(
    run: Path, values: dict[str, object], message: str
) -> None:
    change_record(run, "collect_traces", **values)
    result = lineage(run)
    assert result.exit_code == 1
    assert f"{run / 'run.json'}: {message}" in result.stderr


def test_a_setting_may_differ_from_the_run_that_made_the_artifact(run: Path) -> None:
    change_record(run, "collect_traces", workers=8)
    assert lineage(run).exit_code == 0


@pytest.mark.parametrize("change", [{"recipe": "other"}, {"configs": {}}])
def test_what_no_manifest_holds_is_sealed_in_the_record(run: Path, change: dict[str, object]) -> None:
    runs.write(run, replace(runs.read(run), **change))  # type: ignore[arg-type]
    result = lineage(run)
    assert result.exit_code == 1
    assert "do not give the config_digest recorded beside them" in result.stderr


@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_a_bad_manifest_is_named_once_whoever_was_made_from_it(run: Path, damage: str) -> None:
    record = runs.read(run)
    traces = Path(record.store.uri, "objects", "collect_traces", record.artifacts["collect_traces"]["key"])
    manifest = traces / "manifest.json"
    if damage == "changed":
        change_a_byte(manifest, 10)
    else:
        manifest.unlink()
    result = lineage(run)
    assert result.exit_code == 1
    assert result.stderr.count("does not match") == 1, result.stderr


def test_places_are_printed_as_they_can_be_copied(tmp_path: Path) -> None:
    folder = make(tmp_path / "a folder é")
    record = runs.read(folder)
    manifest = Path(record.store.uri, "objects", "distill", record.artifacts["distill"]["key"], "manifest.json")
    change_a_byte(manifest, 10)
    shard = next(manifest.parent.parent.parent.glob("collect_traces/*/*.parquet"))
    shard.unlink()
    for target in (folder, folder / "bundle"):
        result = lineage(target)
        assert f"does not match: {manifest}: " in result.stderr
        assert f"does not match: {shard}: missing" in result.stderr


def test_a_missing_object_is_named(run: Path) -> None:
    store = Path(runs.read(run).store.uri)
    traces = runs.read(run).artifacts["collect_traces"]["key"]
    shard = next((store / "objects" / "collect_traces" / traces).glob("*.parquet"))
    shard.unlink()
    (run / "bundle" / "model.safetensors").unlink()
    result = lineage(run)
    assert result.exit_code == 1
    assert shard.name in result.stderr
    assert str(run / "bundle" / "model.safetensors") in result.stderr


def test_a_whole_forged_artifact_breaks_the_chain(run: Path, tmp_path: Path) -> None:
    """Somebody rewrites the traces and gives them a manifest of their own: what was made from them remembers."""
    other = make(tmp_path / "other")
    store, key = Path(runs.read(run).store.uri), runs.read(run).artifacts["collect_traces"]["key"]
    forged = Path(runs.read(other).store.uri, "objects", "profile_kv", runs.read(other).artifacts["profile_kv"]["key"])
    place = store / "objects" / "collect_traces" / key
    shutil.rmtree(place)
    shutil.copytree(forged, place)
    result = lineage(run)
    assert result.exit_code == 1
    assert f"collect_traces/{key}" in result.stderr


def test_the_expected_root(run: Path) -> None:
    result = lineage(run, "--expect", "sha256:" + "0" * 64)
    assert result.exit_code == 1
    assert "expected was sha256:000" in result.stderr
    record = json.loads((run / "run.json").read_text())
    record["root"] = "sha256:" + "0" * 64  # a rewritten record: the manifest in the store still says otherwise
    (run / "run.json").write_text(json.dumps(record))
    result = lineage(run, "--expect", record["root"])
    assert result.exit_code == 1
    assert "run.json recorded sha256:000" in result.stderr


def test_an_expected_root_is_accepted_as_people_copy_it(original: Path) -> None:
    root = runs.read(original).root
    for text in (root, root.removeprefix("sha256:"), root.upper()):
        assert lineage(original, "--expect", text).exit_code == 0
    for text in (root[:19], f"sha512:{root[7:]}", "latest", ""):
        result = lineage(original, "--expect", text)
        assert result.exit_code == 2
        assert f"--expect {text!r}: sha256: and 64 hexadecimal digits are expected" in result.stderr


def test_a_digest_and_the_store_are_enough(run: Path) -> None:
    record = runs.read(run)
    shutil.rmtree(run)
    result = lineage(record.root, "--store", record.store.uri, "--json")
    assert result.exit_code == 0, result.output
    chain = json.loads(result.stdout)
    assert chain["root"] == record.root
    assert {node["stage"]: node["digest"] for node in chain["artifacts"]} == {
        stage: artifact["digest"] for stage, artifact in record.artifacts.items()
    }
    for stage, artifact in record.artifacts.items():
        assert lineage(artifact["digest"], "--store", record.store.uri).exit_code == 0, stage

    unknown = lineage(f"sha256:{'0' * 64}", "--store", record.store.uri)
    assert (unknown.exit_code, "no artifact in the store" in unknown.output) == (2, True)
    assert "name its store with --store" in lineage(record.root).output
    assert "digest 'sha256:12': sha256: and 64" in lineage("sha256:12", "--store", record.store.uri).output


def test_what_is_neither_run_nor_bundle(run: Path, tmp_path: Path) -> None:
    result = lineage(tmp_path / "nothing", "--data-dir", run.parents[1])
    assert result.exit_code == 2
    assert "no such folder" in result.output
    assert run.name in result.output
    (run / "bundle" / "store.json").unlink()
    assert "--store" in lineage(run / "bundle").output
    assert lineage(run / "bundle", "--store", runs.read(run).store.uri).exit_code == 0
    shutil.rmtree(runs.read(run).store.uri)
    assert "does not exist" in lineage(run).output
