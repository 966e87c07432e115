"""The ablation's one command on the tiny model, and its statistics."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from parts.paired import paired_difference

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "ablation.py"


def test_what_prompts_and_seeds_have_in_common_cancels() -> None:
    random = np.random.default_rng(1)
    base_SU = 10 * random.random((3, 20)) + 100 * random.random((1, 20))
    same = paired_difference(base_SU + 0.5, base_SU)
    assert same == {"mean": 0.5, "low": 0.5, "high": 0.5, "p": 0.0}
    noise_SU = random.normal(size=(3, 20))
    noisy = paired_difference(base_SU + noise_SU - noise_SU.mean(), base_SU)
    assert noisy["mean"] == pytest.approx(0, abs=1e-5)
    assert noisy["low"] < 0 < noisy["high"]
    assert noisy["p"] > 0.5
    assert paired_difference(base_SU, base_SU)["p"] == 1.0


@pytest.mark.slow
def test_one_command_compares_the_arms_at_equal_budgets(tiny_model: Path) -> None:
    small = {"--prompts": 10, "--tokens": 40, "--answer-tokens": 8, "--seeds": 1}
    options = [text for option in small.items() for text in map(str, option)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--model", str(tiny_model), *options],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["arms"].keys() == {"off-policy", "mixed", "on-policy"} == result["scored_tokens"].keys()
    assert all(40 <= tokens < 40 + 8 * 9 for (tokens,) in result["scored_tokens"].values())
    assert result["minus_off_policy"]["on-policy"]["forward_kl_nats"]["mean"] == pytest.approx(
        result["arms"]["on-policy"]["forward_kl_nats"] - result["arms"]["off-policy"]["forward_kl_nats"], abs=2e-5
    )
    assert all(arm["forward_kl_nats"] > 0 for arm in result["arms"].values())
