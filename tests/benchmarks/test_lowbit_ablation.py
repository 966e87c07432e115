"""The ablation of low-bit distillation: its arms are configurations, and its one command runs on the tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from lowbit_ablation import ARMS, BASE, configured

from reflux.components.distill import stage
from reflux.components.distill.config import DistillConfig

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "lowbit_ablation.py"
TRIED = ("all parts", "with a verifier")


def test_every_arm_is_a_configuration_of_as_many_steps_that_differs_from_the_first() -> None:
    parted = {arm: [configured(BASE | options) for options in trainings] for arm, trainings in ARMS.items()}
    assert len({str(made) for made in parted.values()}) == len(parted)
    for arm, made in parted.items():
        for _, options in made:
            config = DistillConfig(**options)
            steps = sum(phase.steps for phase in stage.schedule(config, has_policy=config.activation == "dual"))
            assert steps >= 20, arm


@pytest.mark.slow
def test_one_command_trains_the_arms_and_compares_them(tiny_model: Path) -> None:
    small = {"--prompts": 10, "--steps": 3, "--answer-tokens": 8, "--seeds": 1}
    options = [text for option in small.items() for text in map(str, option)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--model", str(tiny_model), *options, "--arms", *TRIED],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["arms"].keys() == set(TRIED) == result["last_step"].keys()
    assert result["minus all parts"].keys() == set(TRIED[1:])
    assert all(arm["forward_kl_nats"] > 0 for arm in result["arms"].values())
    assert "verifier_solved" in result["last_step"]["with a verifier"][0]
    assert "error_last_layer" in result["last_step"]["all parts"][0]
