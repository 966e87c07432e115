"""An artifact is whole or does not exist, and what is read from it is what was written."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import attempts
import pyarrow as pa
import pytest

from reflux.components import artifacts, environment
from reflux.components.artifacts import Artifact, ArtifactError, Writer
from reflux.components.provenance import to_bytes
from reflux.components.schemas import TRAINING
from reflux.components.sources import resolve
from reflux.components.storage import Store
from reflux.components.stores.local_store import LocalStore


def committed(store: Store, **options: object) -> Artifact:
    output = attempts.writer(store, **options)  # type: ignore[arg-type]
    attempts.work(output)
    return output.commit({"loss": 0.25})


def change_byte(store: Store, key: str, position: int = -1) -> None:
    """Damage an object behind the back of every reader."""
    data = bytearray(store.read(key))
    data[position] ^= 1
    store.write(key, bytes(data))


def test_an_artifact_comes_back_as_it_was_written(store: Store, tmp_path: Path) -> None:
    made = committed(store)
    read = Artifact.load(store, made.bytes)
    assert (read.stage, read.key, read.digest) == ("distill", made.key, made.digest)
    assert read.metrics == {"loss": 0.25}
    assert read.config == {"lr": 0.5}
    assert read.parents == {}
    assert [s.name for s in read.shards()] == [
        "model.safetensors",
        *(f"training/{n:05d}" for n in range(attempts.SHARDS)),
        "training_times",
    ]
    expected = pa.concat_tables(attempts.training_rows(step) for step in range(attempts.SHARDS))
    assert read.table("training").equals(expected)
    assert pa.Table.from_batches(read.batches("training")).equals(expected)
    assert read.table("training/00002", ["value"]).equals(attempts.training_rows(2).select(["value"]))
    assert read.schema_metadata("training") == {"tokenizer": "t"}
    assert [(s.rows, s.measured) for s in read.shards("training_times")] == [(1, True)]
    assert read.file("model.safetensors") == attempts.WEIGHTS
    read.download("model.safetensors", tmp_path / "new" / "weights")
    read.download_all("", tmp_path / "all")
    for copy in (tmp_path / "new" / "weights", tmp_path / "all" / "model.safetensors"):
        assert copy.read_bytes() == attempts.WEIGHTS
    assert sorted(path.name for path in (tmp_path / "all" / "training").iterdir())[-1] == "00004"
    assert artifacts.verify(store, read.stage, read.key) == []
    assert store.list() == sorted([f"objects/distill/{read.key}/manifest.json", *(s.object for s in read.shards())])


def test_a_name_that_no_shard_has_is_an_error_that_lists_those_there_are(store: Store, tmp_path: Path) -> None:
    artifact = committed(store)
    for read in (artifact.table, artifact.file, artifact.schema_metadata, lambda name: next(artifact.batches(name))):
        with pytest.raises(ArtifactError, match=r"has no shard 'trainin'.*training/00000"):
            read("trainin")
    with pytest.raises(ArtifactError, match="'training' is several shards"):
        artifact.download("training", tmp_path / "x")


@pytest.mark.parametrize("shard", ["training/00001", "training_times", "model.safetensors"])
def test_a_changed_byte_of_a_shard_is_an_error_that_names_it(store: Store, tmp_path: Path, shard: str) -> None:
    artifact = committed(store)
    (changed,) = artifact.shards(shard)
    change_byte(store, changed.object)
    reads: list[Callable[[], object]] = [
        lambda: artifact.file(shard),
        lambda: artifact.download(shard, tmp_path / "copy"),
        lambda: artifact.download_all("", tmp_path / "all"),
    ]
    if shard != "model.safetensors":
        reads += [lambda: artifact.table(shard), lambda: list(artifact.batches(shard))]
    for read in reads:
        with pytest.raises(ArtifactError, match=f"{changed.object}.*{shard}"):
            read()
    assert not (tmp_path / "copy").exists()
    (problem,) = artifacts.verify(store, artifact.stage, artifact.key)
    assert changed.object in problem


def test_a_changed_manifest_is_an_error_that_names_it(store: Store) -> None:
    artifact = committed(store)
    name = f"objects/distill/{artifact.key}/manifest.json"
    change_byte(store, name, position=len(artifact.bytes) // 2)
    for look in (attempts.writer(store).existing, lambda: Artifact.open(store, "distill", artifact.key)):
        with pytest.raises(ArtifactError, match=name):
            look()
    (problem,) = artifacts.verify(store, "distill", artifact.key)
    assert name in problem


def test_a_manifest_rewritten_with_all_its_digests_is_still_detected(store: Store) -> None:
    """Who can write the store can seal another manifest: the copy that was handed over and the children tell."""
    parent = committed(store)
    child = committed(store, stage="calibrate", parents={"student": parent})
    name = f"objects/distill/{parent.key}/manifest.json"
    assert {n: p.digest for n, p in artifacts.parents(child).items()} == {"student": parent.digest}
    store.write(name, to_bytes(replace(parent.record, metrics={"loss": 0.01})))
    with pytest.raises(ArtifactError, match=f"{name}: is not the manifest that was handed over"):
        Artifact.load(store, parent.bytes)
    store.write(name, to_bytes(replace(parent.record, shards=parent.record.shards[1:])))
    with pytest.raises(ArtifactError, match=f"{name}: is sha256:.*was made from {parent.digest}"):
        artifacts.parents(child)
    store.write(name, child.bytes)
    with pytest.raises(ArtifactError, match="another artifact"):
        artifacts.parents(child)
    store.delete(name)
    with pytest.raises(ArtifactError, match=f"{name}: no artifact was committed there"):
        artifacts.parents(child)


def test_half_an_artifact_does_not_exist(store: Store) -> None:
    output = attempts.writer(store)
    attempts.work(output)
    assert attempts.writer(store).existing() is None
    with pytest.raises(ArtifactError, match="no artifact was committed"):
        Artifact.open(store, "distill", output.key)
    artifact = output.commit({})
    found = attempts.writer(store).existing()
    assert found is not None
    assert found.digest == artifact.digest


def test_a_lost_object_is_made_again_if_it_can_be_and_named_if_not(store: Store) -> None:
    artifact = committed(store)
    weights, times = artifact.shards("model.safetensors")[0], artifact.shards("training_times")[0]
    store.delete(weights.object)
    assert artifacts.verify(store, "distill", artifact.key) == [
        f"{artifacts.place(store, weights.object)}: missing (shard model.safetensors)"
    ]
    output = attempts.writer(store)
    assert output.existing() is None
    attempts.work(output)
    assert output.commit({}).digest == artifact.digest
    assert artifacts.verify(store, "distill", artifact.key) == []
    store.delete(times.object)  # measured: it cannot come out the same again
    output = attempts.writer(store)
    attempts.work(output)
    with pytest.raises(ArtifactError, match=f"{times.object}.*remove objects/distill/{artifact.key}"):
        output.commit({})


def test_nothing_committed_is_ever_overwritten(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    first = committed(store)
    output = attempts.writer(store)
    output.write_file("other.txt", b"another outcome of the same work")
    late = output.commit({"loss": 9.0})
    assert late.bytes == first.bytes == store.read(f"objects/distill/{first.key}/manifest.json")
    assert "another attempt was first" in caplog.text
    assert artifacts.verify(store, "distill", first.key) == []


def test_equal_work_has_equal_digests_whatever_the_order_the_time_and_the_place(tmp_path: Path) -> None:
    def work(folder: str, names: list[str]) -> Artifact:
        output = attempts.writer(Store.open(str(tmp_path / folder)))
        for name in names:
            output.write_table(name, attempts.training_rows(int(name[-1])), TRAINING)
        output.write_file("log", folder.encode(), measured=True)
        return output.commit({"seconds": len(folder)})

    one, other = work("here", ["t/1", "t/2", "t/3"]), work("elsewhere", ["t/3", "t/1", "t/2"])
    assert one.digest == other.digest
    assert one.bytes != other.bytes
    assert work("third", ["t/1", "t/2"]).digest != one.digest


def test_the_key_follows_configuration_parents_and_sources(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"))
    prompts = tmp_path / "prompts.jsonl"
    parents = {"traces": committed(store, stage="collect_traces")}

    def key(lr: float = 0.5, workers: int = 1, text: str = "a", **given: dict[str, Artifact]) -> str:
        prompts.write_text(text)
        return Writer(
            store,
            stage="distill",
            version="1",
            key_fields={"lr": lr},
            other_fields={"workers": workers},
            parents=given.get("parents", parents),
            sources={"prompts_uri": resolve("prompts_uri", str(prompts))},
        ).key

    assert key() == key(workers=2)
    assert len({key(), key(lr=0.6), key(text="b"), key(parents={})}) == 4


def test_what_a_stage_gave_wrongly_is_named(tmp_path: Path) -> None:
    output = attempts.writer(Store.open(str(tmp_path)))
    with pytest.raises(ValueError, match="commit without a single shard"):
        output.commit({})
    output.write_file("a", b"1")
    for action, message in (
        (lambda: output.write_file("a", b"2"), "shard a: written twice"),
        (lambda: output.write_file("../a", b"2"), r"name '\.\./a'"),
        (lambda: output.commit({"loss": float("nan")}), "metric loss is nan"),
        (lambda: output.source("prompts_uri"), "prompts_uri: no source was given"),
        (lambda: output.pending_table("b"), "has written no shard 'b'"),
    ):
        with pytest.raises(ValueError, match=message):
            action()


def test_a_manifest_records_versions_and_no_secret(tmp_path: Path) -> None:
    (tmp_path / "labels").write_text("x")
    output = Writer(
        Store.open(str(tmp_path / "store")),
        stage="ingest_labels",
        version="1",
        key_fields={},
        other_fields={"endpoint": "https://user:hunter2@host/x?token=hunter2"},
        parents={},
        sources={"labels_uri": resolve("labels_uri", str(tmp_path / "labels"))},
        platform={"threads": "1"},
    )
    output.write_file("a", b"1")
    artifact = output.commit({})
    assert b"hunter2" not in artifact.bytes
    assert artifact.record.versions["torch"].startswith("2.")
    assert artifact.record.platform["threads"] == "1"
    assert artifact.record.started <= artifact.record.finished
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert environment.commit().removesuffix("+changed") == head.stdout.strip()


def test_a_copy_of_an_artifact_is_verified_by_its_manifest(tmp_path: Path) -> None:
    artifact = committed(Store.open(str(tmp_path / "store")))
    folder = tmp_path / "bundle"
    artifact.download_all("", folder)
    assert artifacts.verify_copy(folder) == [f"{folder / 'manifest.json'}: missing"]
    (folder / "manifest.json").write_bytes(artifact.bytes)
    assert artifacts.verify_copy(folder) == []
    change_byte(LocalStore(folder), "model.safetensors", 100)
    (folder / "training_times").unlink()
    problems = artifacts.verify_copy(folder)
    assert [problem.partition(":")[0] for problem in problems] == [
        str(folder / "model.safetensors"),
        str(folder / "training_times"),
    ]
    change_byte(LocalStore(folder), "manifest.json", 100)
    assert len(artifacts.verify_copy(folder)) == 1


def test_artifacts_are_read_without_the_heavy_libraries() -> None:
    heavy = {"torch", "transformers", "mlflow", "kfp", "boto3"}
    program = f"import sys, {artifacts.__name__}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
