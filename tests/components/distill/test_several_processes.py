"""Training in several processes: what torchrun starts computes what one process computes, and writes it once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import step_in_processes
import tiny_chain
import torch
from step_in_processes import MODES
from tiny_bundle import write_tiny_bundle
from tiny_chain import Chain

pytestmark = pytest.mark.slow
PROGRAM = Path(step_in_processes.__file__)


@pytest.fixture(scope="module")
def chain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    made = tiny_chain.make(tmp_path_factory.mktemp("chain"), tiny_model)
    write_tiny_bundle(made.folder / "codes", tiny_model, activation_bits=16, zero_points=True)
    (made.folder / "codes" / "quant_config.json").unlink()  # another method's checkpoint has none
    return made


@pytest.fixture(scope="module")
def alone(chain: Chain) -> dict[str, dict[str, Any]]:
    """One process; ddp and fsdp2 are the same there."""
    plain = step_in_processes.measured(chain)
    others = {mode: step_in_processes.measured(chain, **MODES[mode]) for mode in MODES if mode not in ("ddp", "fsdp2")}
    return {"ddp": plain, "fsdp2": plain, **others}


@pytest.fixture(scope="module")
def shared(chain: Chain, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The same by two processes over gloo, for each way of sharing."""
    out = tmp_path_factory.mktemp("shared")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, str(PROGRAM), str(chain.folder), str(out)]
    started = [subprocess.Popen(command, env=common | {"RANK": str(rank), "OMP_NUM_THREADS": "1"}) for rank in (0, 1)]
    assert [process.wait(timeout=240) for process in started] == [0, 0]
    return {mode: torch.load(out / f"{mode}.pt", weights_only=True) for mode in MODES}


@pytest.mark.parametrize("mode", MODES)
def test_two_processes_have_the_loss_and_gradient_of_one(
    alone: dict[str, dict[str, Any]], shared: dict[str, dict[str, Any]], mode: str
) -> None:
    """To a thousandth of the largest entry: a value on a rounding border may fall to the other side elsewhere."""
    together, one = shared[mode], alone[mode]
    assert together["loss"] == pytest.approx(one["loss"], rel=1e-4)
    assert together["norm"] == pytest.approx(one["norm"], rel=1e-3)
    assert together["grads"].keys() == one["grads"].keys()
    for name, grad in one["grads"].items():
        limit = 1e-3 * grad.abs().max().item() + 1e-9
        torch.testing.assert_close(together["grads"][name], grad, rtol=0, atol=limit)


@pytest.mark.parametrize("mode", MODES)
def test_their_steps_are_those_of_one(
    alone: dict[str, dict[str, Any]], shared: dict[str, dict[str, Any]], mode: str
) -> None:
    """The same sequences in every step, the first step's numbers, and rollouts that are shared out and collected."""
    together, one = shared[mode], alone[mode]
    first, expected = together["history"][0], one["history"][0]
    assert first.keys() == expected.keys()
    for name in ("loss_nats", "gradient_norm", "scored_tokens", "rollout_tokens", "rollout_budget_exhausted"):
        assert first[name] == pytest.approx(expected[name], rel=1e-3), name
    assert together["history"][1]["scored_tokens"] == one["history"][1]["scored_tokens"]
    apart = torch.cat([(together["weights"][name] - value).abs().flatten() for name, value in one["weights"].items()])
    # Adam's first steps are as long as the rate, 1e-3, whatever the gradient's size: where that is nearly 0 they differ
    assert (apart > 1e-4).float().mean() < 0.01
