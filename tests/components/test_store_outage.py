"""Stages that lose their store in the middle, or share it with another process that does the same work."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import attempts
import pytest
import tiny_chain
from servers import fault_proxy, seaweed
from servers.fault_proxy import Fault, Proxy

from reflux.components import __main__ as entry
from reflux.components import artifacts
from reflux.components.artifacts import Artifact
from reflux.components.storage import S3Settings, Store, StoreError


@pytest.fixture
def proxy(s3: S3Settings) -> Iterator[Proxy]:
    with fault_proxy.in_front_of(s3, patience_s=60.0) as running:
        yield running


@pytest.fixture
def direct(s3: S3Settings) -> Store:
    """An empty store, past the proxy."""
    return Store.open(f"s3://{seaweed.BUCKET}/{uuid.uuid4().hex}", s3)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    output = attempts.writer(Store.open(str(tmp_path_factory.mktemp("undisturbed"))))
    attempts.work(output)
    return output.commit({"loss": 0.25})


@pytest.mark.parametrize(
    ("moment", "away_s"),
    [
        ("training/00002.json", 0.7),
        ("files/state.json", 0.7),
        ("manifest.json", 0.7),
        pytest.param("files/state.json", 10.0, marks=pytest.mark.slow),
    ],
)
def test_a_store_that_is_away_for_seconds_costs_a_stage_nothing_but_time(
    proxy: Proxy, direct: Store, undisturbed: Artifact, moment: str, away_s: float
) -> None:
    proxy.next("PUT", moment, Fault(before=lambda: proxy.go_away(away_s)))
    output = attempts.writer(Store.open(direct.uri, proxy.settings))
    assert attempts.work(output) == list(range(attempts.SHARDS)), "in one attempt"
    artifact = output.commit({"loss": 0.25})
    assert proxy.faults == []
    assert artifact.digest == undisturbed.digest
    assert artifacts.verify(direct, artifact.stage, artifact.key) == []


def test_a_stage_that_loses_its_store_for_longer_fails_clearly_and_resumes(
    proxy: Proxy, direct: Store, undisturbed: Artifact
) -> None:
    hasty = Store.open(direct.uri, replace(proxy.settings, patience_s=1.0))
    proxy.next("PUT", "training/00003.json", Fault(before=lambda: proxy.go_away(60)))
    with pytest.raises(StoreError, match=f"store {direct.uri} at {proxy.settings.endpoint}: .*training/00003"):
        attempts.work(attempts.writer(hasty))
    proxy.away_until = 0.0
    output = attempts.writer(hasty)
    assert attempts.work(output) == [3, 4]
    assert output.commit({"loss": 0.25}).digest == undisturbed.digest


def test_the_entry_point_says_in_one_line_that_the_store_is_away(
    proxy: Proxy, direct: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name, value in replace(proxy.settings, patience_s=0.5).store_env().items():
        monkeypatch.setenv(name, value)
    (tmp_path / "leaves.txt").write_text("assam")
    flags = ["--store", direct.uri, "--run", "r1", "--leaves", str(tmp_path / "leaves.txt")]
    arguments = ["toy_stages.brew", *flags, "--out-tea", str(tmp_path / "tea.json")]
    proxy.next("PUT", ".txt", Fault(before=lambda: proxy.go_away(60)))
    assert entry.main(arguments) != 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("reflux brew:")]
    assert f"store {direct.uri} at {proxy.settings.endpoint}" in line
    proxy.away_until = 0.0
    assert entry.main(arguments) == 0


def profile_process(root: Path, model: Path, store: str, settings: S3Settings, n: int) -> subprocess.Popen[str]:
    """profile_kv as a container runs it: its cost tables are times, so no two runs write the same bytes."""
    flags = ["--store", store, "--run", f"r{n}", "--student-uri", str(model), "--traces", str(root / "traces.json")]
    small = ["--cost-traces", "1", "--cost-tokens", "4", "--out-profile", str(root / f"profile-{n}.json")]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "AWS_", "REFLUX_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "reflux.components", "profile_kv", *flags, *small],
        env={**kept, **settings.env(), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("atomic_create")
def test_of_two_processes_that_measure_the_loser_adopts_the_winners_times(
    proxy: Proxy, direct: Store, tmp_path: Path, tiny_model: Path
) -> None:
    (tmp_path / "chain").mkdir()
    chain = tiny_chain.make(tmp_path / "chain", tiny_model)
    for key in chain.traces.store.list("objects/collect_traces"):
        direct.write(key, chain.traces.store.read(key))
    (tmp_path / "traces.json").write_bytes(chain.traces.bytes)
    both = threading.Barrier(2, timeout=120)
    proxy.next("PUT", "manifest.json", Fault(before=both.wait), Fault(before=both.wait))  # nobody is first by far

    racers = [profile_process(tmp_path, tiny_model, direct.uri, proxy.settings, n) for n in (1, 2)]
    said = [racer.communicate(timeout=240) for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0], said
    assert proxy.faults == [], "both came to the manifest at the same moment"

    manifests = {(tmp_path / f"profile-{n}.json").read_bytes() for n in (1, 2)}
    assert len(manifests) == 1
    profile = Artifact.load(direct, manifests.pop())
    digests = [line for out, _ in said for line in out.splitlines() if "made sha256:" in line]
    assert digests == [f"profile_kv: made {profile.digest}"] * 2

    measured = [shard for shard in profile.shards() if shard.measured]
    assert "kv_cost" in {shard.name for shard in measured}
    tables = [shard for shard in measured if shard.object.endswith(".parquet")]
    put = {r.target for r in proxy.seen if r.method == "PUT" and r.target.endswith(".parquet")}
    listed = {shard.object for shard in profile.shards() if shard.object.endswith(".parquet")}
    assert len(listed) < len(put) <= len(listed) + len(tables), "each measured for itself; all else came out the same"
    folder = f"objects/profile_kv/{profile.key}"
    objects = {f"{folder}/manifest.json", *(shard.object for shard in profile.shards())}
    assert set(direct.list(folder)) == objects, "the loser's times are gone"
    assert artifacts.verify(direct, "profile_kv", profile.key) == []
