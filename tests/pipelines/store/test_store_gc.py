"""`reflux store du` and `gc` on real stores: what goes, what stays whole, and stages that begin in the same moment."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import attempts
import finished_run
import pytest
from click.testing import CliRunner, Result

from reflux.components import artifact_writer, artifacts
from reflux.components.artifacts import Artifact, ArtifactError
from reflux.components.storage import Store
from reflux.components.stores.local_store import LocalStore
from reflux.components.stores.s3_upload import SINGLE_PUT_BYTES
from reflux.pipelines import runs
from reflux.pipelines.__main__ import cli
from reflux.pipelines.review import lineage
from reflux.pipelines.store import garbage, inventory, removal


def gc(run: Path, *more: str) -> Result:
    """The command on the store of a finished run, with no time of grace: in a test everything is young."""
    store = runs.read(run).store.uri
    arguments = ["store", "gc", "--store", store, "--data-dir", str(run.parents[1]), "--grace-hours", "0", *more]
    return CliRunner().invoke(cli, arguments)


def snapshot(store: Store) -> dict[str, bytes]:
    return {key: store.read(key) for key in store.list()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return finished_run.make(tmp_path)


def test_without_delete_nothing_is_touched_and_with_it_only_what_was_shown(run: Path) -> None:
    store = Store.open(runs.read(run).store.uri)
    before = snapshot(store)
    old = attempts.writer(store, lr=0.1)
    attempts.work(old)
    old.commit({})
    killed = attempts.writer(store, lr=0.2)
    assert killed.existing() is None
    attempts.work(killed)
    key = runs.read(run).artifacts["calibrate"]["key"]
    store.write(f"objects/calibrate/{key}/checkpoints/00000001/files/model", b"left by a kill")
    assert isinstance(store, LocalStore)
    (store.root / ".partial" / "left-by-a-kill").write_bytes(b"x" * 100)
    time.sleep(0.01)

    full = snapshot(store)
    shown = gc(run)
    assert shown.exit_code == 0, shown.output
    assert "would go; --delete removes it" in shown.output
    assert snapshot(store) == full
    rows = json.loads(gc(run, "--json").output)
    assert {row["key"] for row in rows} == {old.key, killed.key, key}
    done = gc(run, "--delete")
    assert done.exit_code == 0, done.output
    assert snapshot(store) == before
    assert list((store.root / ".partial").iterdir()) == []
    assert lineage.verify(str(run), data_dir=run.parents[1]).mismatches == []
    assert "0.0 kB would go" in gc(run).output


def test_the_newest_runs_and_what_people_name_are_kept(run: Path, tmp_path: Path) -> None:
    record = runs.read(run)
    store = Store.open(record.store.uri)
    other = attempts.writer(store, lr=0.9)
    attempts.work(other)
    made = other.commit({})
    newer = run.parent / "newer"
    newer.mkdir()
    runs.write(newer, replace(record, run="newer", artifacts={"distill": {"key": made.key, "digest": made.digest}}))
    time.sleep(0.01)
    assert {row["stage"] for row in json.loads(gc(run, "--json", "--keep-last", "1").output)} == set(record.artifacts)
    for name in (record.root, str(run), run.name):
        assert json.loads(gc(run, "--json", "--keep-last", "1", "--keep", name).output) == []
    left = json.loads(gc(run, "--json", "--keep-last", "1", "--keep", str(run / "bundle")).output)
    assert [row["stage"] for row in left] == ["evaluate"], "a bundle leads to everything but its evaluation"
    assert gc(run, "--delete", "--keep-last", "1", "--keep", str(run / "bundle")).exit_code == 0
    assert lineage.verify(str(run / "bundle"), data_dir=tmp_path).mismatches == []
    refused = gc(run, "--keep", "sha256:" + "0" * 64)
    assert refused.exit_code == 2
    assert "the store has no such artifact" in refused.output


def test_a_store_of_which_nothing_is_wanted_is_not_emptied_by_mistake(run: Path, tmp_path: Path) -> None:
    store = runs.read(run).store.uri
    arguments = [
        "store",
        "gc",
        "--store",
        store,
        "--data-dir",
        str(tmp_path / "wrong"),
        "--grace-hours",
        "0",
        "--delete",
    ]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 2
    assert "all of it would go; name the right --data-dir" in result.output
    assert lineage.verify(str(run), data_dir=tmp_path).mismatches == []
    assert CliRunner().invoke(cli, ["store", "gc", "--keep-last", "0"]).exit_code == 2


def test_what_is_young_stays_with_all_that_it_was_made_from(run: Path) -> None:
    store = runs.read(run).store.uri
    data = str(run.parents[1] / "no-runs")
    result = CliRunner().invoke(cli, ["store", "gc", "--store", store, "--data-dir", data, "--json"])
    assert json.loads(result.output) == []
    rows = json.loads(CliRunner().invoke(cli, ["store", "du", "--store", store, "--data-dir", data, "--json"]).output)
    assert {tuple(row["kept_for"]) for row in rows} == {("touched within 24 h, or an input of what was",)}


def collected(store: Store, keep: list[garbage.Place], between: Callable[[], object] = lambda: None) -> removal.Removed:
    """A collection without grace; `between` happens after the plan was made."""
    time.sleep(1.1)  # S3 dates objects by whole seconds
    held = inventory.take(store)
    plan = garbage.plan(held, {"run r": keep}, [], -1.0)
    between()
    return removal.carry_out(store, plan)


def committed(store: Store, lr: float, parents: dict[str, Artifact] | None = None) -> Artifact:
    output = attempts.writer(store, lr=lr, parents=parents)
    output.write_file("a.bin", os.urandom(100))
    return output.commit({})


def test_on_every_store_lineage_stands_after_a_collection(store: Store) -> None:
    parent, other = committed(store, 0.1), committed(store, 0.2)
    child = committed(store, 0.3, {"traces": parent})
    before = snapshot(store)
    done = collected(store, [("distill", child.key)])
    assert (done.objects, done.spared) == (2, ())
    gone = set(before) - set(store.list())
    assert gone == {key for key in before if other.key in key}
    assert artifacts.verify(store, "distill", child.key) == artifacts.verify(store, "distill", parent.key) == []


def test_a_stage_that_begins_after_the_plan_was_made_is_spared(store: Store) -> None:
    reused = committed(store, 0.1)
    resumed = attempts.writer(store, lr=0.2)
    resumed.write_file("a.bin", b"a")

    def begin() -> None:
        assert attempts.writer(store, lr=0.1).existing() is not None
        assert attempts.writer(store, lr=0.2).existing() is None

    done = collected(store, [], begin)
    assert sorted(done.spared) == sorted([f"distill/{reused.key}", f"distill/{resumed.key}"])
    assert artifacts.verify(store, "distill", reused.key) == []
    again = attempts.writer(store, lr=0.2)
    assert again.done("a.bin")
    assert not [key for key in store.list() if key.endswith(artifact_writer.REMOVING)]


def test_a_stage_that_begins_during_the_removal_stops_with_a_message(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = committed(store, 0.1)
    folder = f"objects/distill/{artifact.key}"
    store.write(f"{folder}/{artifact_writer.REMOVING}", b"{}")
    with pytest.raises(ArtifactError, match=f"{folder}: `reflux store gc` is removing it; try again later"):
        attempts.writer(store, lr=0.1).existing()
    assert collected(store, []).spared == ()
    assert store.list() == []

    artifact = committed(store, 0.1)
    store.write(f"{folder}/{artifact_writer.REMOVING}", b"{}")
    monkeypatch.setattr(artifact_writer, "REMOVING_S", -10.0)  # as if it were an hour later: its process is dead
    assert attempts.writer(store, lr=0.1).existing() is not None
    assert not store.exists(f"{folder}/{artifact_writer.REMOVING}")


class Cut(io.RawIOBase):
    """A file that ends with an error after three parts."""

    left = 3 * SINGLE_PUT_BYTES // 2

    def read(self, size: int = -1) -> bytes:
        if self.left <= 0:
            raise KeyboardInterrupt
        self.left -= size
        return bytes(size)


def test_writes_that_were_cut_off_are_found_and_discarded(store: Store) -> None:
    if isinstance(store, LocalStore):
        (store.root / ".partial").mkdir(parents=True)
        (store.root / ".partial" / "tmpabc").write_bytes(b"x")
    else:
        client, bucket = store._client, store.bucket  # type: ignore[attr-defined]
        client.create_multipart_upload(Bucket=bucket, Key=f"{store.uri.rpartition('/')[2]}/objects/a")
    assert len(store.unfinished()) == 1
    assert collected(store, []).objects == 1
    assert store.unfinished() == {}
    with pytest.raises(KeyboardInterrupt):
        store.write_stream("objects/a", Cut())  # type: ignore[arg-type]
    assert store.unfinished() == {}, "an interruption that can be heard leaves nothing"
    assert store.list() == []
