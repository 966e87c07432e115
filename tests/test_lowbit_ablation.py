"""The ablation of low-bit distillation: its arms are configurations, and its one command runs on the tiny model."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reflux.components.distill import stage
from reflux.components.distill.config import DistillConfig

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
ARMS = ("all parts", "with a verifier")


@pytest.fixture(scope="module")
def ablation() -> Any:
    sys.path.insert(0, str(FOLDER))  # as a script finds the one that it builds on
    spec = importlib.util.spec_from_file_location("lowbit_ablation", FOLDER / "lowbit_ablation.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(FOLDER))
    return module


def test_every_arm_is_a_configuration_of_as_many_steps_that_differs_from_the_first(ablation: Any) -> None:
    configs = {
        arm: [DistillConfig(**ablation.BASE | options) for options in trainings]
        for arm, trainings in ablation.ARMS.items()
    }
    assert len({str(made) for made in configs.values()}) == len(configs)
    for arm, made in configs.items():
        for config in made:
            steps = sum(phase.steps for phase in stage.schedule(config, has_policy=config.activation == "dual"))
            assert steps >= 20, arm
    assert set(ARMS) <= configs.keys()


@pytest.mark.slow
def test_one_command_trains_the_arms_and_compares_them(tiny_model: Path) -> None:
    small = {"--prompts": 10, "--steps": 3, "--answer-tokens": 8, "--seeds": 1}
    options = [text for option in small.items() for text in map(str, option)]
    done = subprocess.run(
        [sys.executable, str(FOLDER / "lowbit_ablation.py"), "--model", str(tiny_model), *options, "--arms", *ARMS],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["arms"].keys() == set(ARMS) == result["last_step"].keys()
    assert result["minus all parts"].keys() == set(ARMS[1:])
    assert all(arm["forward_kl_nats"] > 0 for arm in result["arms"].values())
    assert "verifier_solved" in result["last_step"]["with a verifier"][0]
    assert "error_last_layer" in result["last_step"]["all parts"][0]
