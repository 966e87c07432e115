"""kill -9 at random moments, again and again: training that is started anew each time ends with the same bytes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_chain
from tiny_chain import PARENTS, Chain

from reflux.components.artifacts import Artifact
from reflux.components.distill.config import DistillConfig
from reflux.components.storage import Store

STEPS = {"warmup_steps": 1, "joint_steps": 2, "finetune_steps": 9, "validate_every": 3, "export": "best"}


@pytest.fixture(scope="module")
def chain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return tiny_chain.make(tmp_path_factory.mktemp("chain"), tiny_model)


def command(chain: Chain, store: Path, *launcher: str) -> list[str]:
    """distill as a person would start it, with a checkpoint after every second step."""
    shutil.copytree(chain.folder / "objects", store / "objects", ignore=shutil.ignore_patterns("distill"))
    flags = ["--store", str(store), "--run", "killed", "--out-student", str(store / "student.json")]
    for name in PARENTS:
        flags += [f"--{name}", str(chain.folder / f"{name}.json")]
    for name, value in vars(chain.training(**STEPS, checkpoint_every=2)).items():
        if value != getattr(DistillConfig(), name):
            flags += [f"--{name.replace('_', '-')}", str(value)]
    return [sys.executable, *(launcher or ("-m", "reflux.components")), "distill", *flags]


def killed_until_done(call: list[str], store: Path, *, seed: int, kills: int) -> int:
    """Start it, and at most so many times kill it at a random moment with all that it started; how often it was."""
    environment = os.environ | {"MLFLOW_TRACKING_URI": "", "OMP_NUM_THREADS": "1"}
    moment, killed = random.Random(seed), 0
    while True:
        with subprocess.Popen(call, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True) as work:
            assert work.stdout is not None
            for line in work.stdout:
                if "steps" in line and killed < kills:
                    time.sleep(moment.uniform(0, 0.6))
                    break
            else:
                assert work.wait() == 0
                return killed
            if work.poll() is None:
                os.killpg(work.pid, signal.SIGKILL)
                killed += 1
        checkpoints = {path.parent.name for path in store.rglob("distill/*/checkpoints/*/checkpoint.json")}
        assert len(checkpoints) <= 3  # two, and one that was being made room for


@pytest.mark.slow
def test_killed_twice_at_random_moments_it_ends_with_the_same_digest(chain: Chain, tmp_path: Path) -> None:
    assert_kills_change_nothing(chain, tmp_path, seed=1, kills=2)


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(2, 8))
def test_killed_eight_times_it_ends_with_the_same_digest(chain: Chain, tmp_path: Path, seed: int) -> None:
    assert_kills_change_nothing(chain, tmp_path, seed=seed, kills=8)


def assert_kills_change_nothing(chain: Chain, folder: Path, *, seed: int, kills: int) -> None:
    whole = chain.distilled(**STEPS)
    assert killed_until_done(command(chain, folder), folder, seed=seed, kills=kills) > 0
    assert digest(folder) == whole.digest
    assert not list(folder.rglob("distill/*/checkpoints/*/checkpoint.json"))


@pytest.mark.heavy
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp2"])
def test_two_processes_of_torchrun_go_on_where_they_were_killed(chain: Chain, tmp_path: Path, parallelism: str) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--", "reflux.components")
    digests = []
    for kills in (0, 2):
        store = tmp_path / str(kills)
        call = [*command(chain, store, *torchrun), "--parallelism", parallelism]
        assert killed_until_done(call, store, seed=3, kills=kills) == kills
        digests.append(digest(store))
    assert digests[0] == digests[1]


def digest(store: Path) -> str:
    return Artifact.load(Store.open(str(store)), (store / "student.json").read_bytes()).digest
