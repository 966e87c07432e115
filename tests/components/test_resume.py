"""A killed stage ends with the digest of one that was never killed, and stages that race end as one."""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import attempts
import pytest

from reflux.components import artifacts
from reflux.components.artifacts import Writer
from reflux.components.checkpoints import Checkpoints
from reflux.components.schemas import TRAINING
from reflux.components.storage import S3Settings, Store

SPAWN = multiprocessing.get_context("spawn")


def test_a_stage_killed_at_work_resumes_and_ends_with_the_same_digest(
    store: Store, s3: S3Settings, tmp_path: Path
) -> None:
    output = attempts.writer(store)
    pending = f"objects/distill/{output.key}/pending/training"
    victim = SPAWN.Process(target=attempts.work_and_commit, args=(store.uri, s3, 0.2, ""))
    victim.start()
    deadline = time.monotonic() + 30
    while len(store.list(pending)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    victim.kill()  # SIGKILL
    victim.join()
    assert 2 <= len(store.list(pending)) < attempts.SHARDS
    assert output.existing() is None

    computed = attempts.work(output)
    assert len(computed) <= attempts.SHARDS - 2
    artifact = output.commit({})

    undisturbed = attempts.writer(Store.open(str(tmp_path / "undisturbed")))
    assert attempts.work(undisturbed) == list(range(attempts.SHARDS))
    assert artifact.digest == undisturbed.commit({}).digest
    assert artifacts.verify(store, artifact.stage, artifact.key) == []
    assert not [key for key in store.list() if "/pending/" in key or "/checkpoints/" in key]


@pytest.mark.usefixtures("atomic_create")
def test_of_two_processes_that_commit_one_key_the_loser_adopts_the_winners_artifact(
    store: Store, s3: S3Settings
) -> None:
    with ProcessPoolExecutor(2, SPAWN) as pool:
        racers = [pool.submit(attempts.work_and_commit, store.uri, s3, 0.05, mark) for mark in ("one", "other")]
        (_, digest, manifest), (_, other_digest, other_manifest) = [racer.result() for racer in racers]
    assert digest == other_digest
    assert manifest == other_manifest
    key = attempts.writer(store).key
    assert store.read(f"objects/distill/{key}/manifest.json").decode() == manifest
    assert artifacts.verify(store, "distill", key) == []


def write_two(output: Writer) -> None:
    for step in range(2):
        output.write_table(f"training/{step}", attempts.training_rows(step), TRAINING)


def test_a_pending_shard_counts_only_if_it_verifies(store: Store) -> None:
    output = attempts.writer(store)
    write_two(output)
    assert not attempts.writer(store).done("training/2")
    again = attempts.writer(store)
    assert again.done("training/0")
    assert again.pending_table("training/0").equals(attempts.training_rows(0))

    pointers = [f"objects/distill/{output.key}/pending/training/{step}.json" for step in range(2)]
    good = store.read(pointers[0])
    for bad in (good.replace(b'"rows":50', b'"rows":51'), good[:-5], b"", b"[1]", store.read(pointers[1])):
        assert bad != good
        store.write(pointers[0], bad)
        assert not attempts.writer(store).done("training/0")
    (damaged,) = [key for key in store.list() if key.endswith(".parquet") and key.encode() not in good]
    store.write(damaged, store.read(damaged)[:-1])
    assert not attempts.writer(store).done("training/1")

    output = attempts.writer(store)
    write_two(output)  # puts both right again
    artifact = output.commit({})
    assert artifacts.verify(store, "distill", artifact.key) == []


def save(checkpoints: Checkpoints, step: int, folder: Path) -> None:
    for name in ("model", "optimizer"):
        (folder / name).write_text(f"{name} at {step}")
    checkpoints.save(step, {"model": folder / "model", "optimizer/state": folder / "optimizer"})


def test_the_newest_whole_checkpoint_counts_and_two_are_kept(store: Store, tmp_path: Path) -> None:
    checkpoints, into = Checkpoints(store, "work/checkpoints"), tmp_path / "into"
    assert checkpoints.latest(into) is None
    for step in (9, 10, 100):
        save(checkpoints, step, tmp_path)
    assert {key.split("/")[2] for key in store.list()} == {"00000010", "00000100"}
    assert checkpoints.latest(into) == 100
    assert (into / "optimizer" / "state").read_text() == "optimizer at 100"

    store.write("work/checkpoints/00000200/files/model", b"killed before the marker was written")
    assert checkpoints.latest(into) == 100
    store.write("work/checkpoints/00000100/files/optimizer/state", b"changed")
    assert checkpoints.latest(into) == 10
    assert sorted(path.read_text() for path in into.rglob("*") if path.is_file()) == ["model at 10", "optimizer at 10"]
    save(checkpoints, 100, tmp_path)
    assert checkpoints.latest(into) == 100
    store.write("work/checkpoints/00000100/checkpoint.json", b'{"sha256": {"../../x": "0"}}')
    assert checkpoints.latest(into) == 10
    store.delete("work/checkpoints/00000010/files/model")
    assert checkpoints.latest(into) is None
    checkpoints.clear()
    assert store.list() == []


def test_a_checkpoint_needs_a_step_and_a_file(tmp_path: Path) -> None:
    checkpoints = Checkpoints(Store.open(str(tmp_path)), "checkpoints")
    for step, files in ((-1, {"a": tmp_path / "a"}), (1, {})):
        with pytest.raises(ValueError, match="checkpoint of step"):
            checkpoints.save(step, files)
