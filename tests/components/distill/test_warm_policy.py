"""Training with a policy network: it warms the table up, and what follows and is delivered is the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_chain
import torch
from safetensors.torch import load
from stage_writers import writer_for
from tiny_chain import Chain
from tiny_training import training

from reflux.components.artifacts import Artifact
from reflux.components.bundles.policy_table import decode
from reflux.components.calibrate import stage as calibrate
from reflux.components.calibrate.config import CalibrateConfig
from reflux.components.distill.config import DistillConfig
from reflux.components.distill.trainer import Trainer
from reflux.components.distill.warm_policy import settle

SHORT: dict[str, Any] = {"on_policy_fraction": 0.5, "joint_steps": 0, "finetune_steps": 2, "policy_network_lr": 0.05}
NETWORK = {f"policy_network.{name}" for name in ("read_DE", "bias_LH", "out_LHC", "level_LC")}
KINDS = ["mlp", "attention"]


@pytest.fixture(scope="module")
def chain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return tiny_chain.make(tmp_path_factory.mktemp("chain"), tiny_model)


@pytest.fixture(scope="module")
def learned(chain: Chain) -> Artifact:
    return chain.distilled(**SHORT, policy="mlp")


def history(student: Artifact, metric: str) -> dict[int, float]:
    return {row["step"]: row["value"] for row in student.table("training").to_pylist() if row["metric"] == metric}


@pytest.mark.parametrize("kind", KINDS)
def test_the_network_moves_in_the_warm_up_and_is_gone_after_it(kind: str, chain: Chain) -> None:
    trainer = training(chain, **SHORT, policy=kind).trainer
    begun = {name: p.detach().clone() for name, p in trainer.trained().items()}
    for _ in range(2):
        trainer.advance()
    moved = {name for name, p in trainer.trained().items() if not torch.equal(p, begun[name])}
    assert moved == NETWORK | {"policy.log_main_SP"}
    table_SP = trainer.student.policy.log_main_SP.detach().clone()
    trainer.advance()
    assert trainer.network == {} == {name: p for name, p in trainer.trained().items() if name in NETWORK}
    assert not NETWORK & trainer.ema.average.keys()
    assert trainer.student.policy_network is None
    apart_SP = (trainer.student.policy.log_main_SP - table_SP).abs()
    assert apart_SP[4:].min() > 10 * apart_SP[:4].max()  # one step moves the table little, the network did much


def test_the_table_says_what_the_network_said(chain: Chain) -> None:
    trainer = training(chain, **SHORT | {"finetune_steps": 0}, policy="mlp").trainer
    for _ in range(2):
        trainer.advance()
    ids = next(iter(trainer.traces.values())).token_ids
    forward = {"input_ids": torch.tensor([ids]), "position_ids": torch.arange(len(ids))[None], "use_cache": False}

    @torch.no_grad()
    def log_scales() -> torch.Tensor:
        trainer.student(**forward)
        scales = [scale_BT.expand(1, len(ids)) for scale_BT in trainer.student.model.main_scales]
        return torch.stack(scales).log()

    said, table_SP = log_scales(), trainer.student.policy.log_main_SP.detach().clone()
    average_SP = trainer.ema.average["policy.log_main_SP"].clone()
    unexplained = settle(trainer)["policy_network_unexplained_nats"]
    repeated = log_scales()
    change = (said - repeated).abs().mean()
    assert change < 0.3 * (trainer.student.policy.log_main_SP - table_SP)[4:].abs().mean()
    assert 0 < unexplained < 0.3
    moved_SP = trainer.student.policy.log_main_SP.detach() - table_SP
    torch.testing.assert_close(trainer.ema.average["policy.log_main_SP"] - average_SP, moved_SP)
    assert settle(trainer) == {}


def test_a_student_that_was_only_warmed_up_has_the_table_too(chain: Chain) -> None:
    options = SHORT | {"finetune_steps": 0, "ema_decay": 0.0, "export": "last"}
    of_network, of_table = chain.distilled(**options, policy="mlp"), chain.distilled(**options)
    tables = [decode(student.file("policy_table.bin")).scales()[..., 0].log() for student in (of_network, of_table)]
    assert (tables[0] - tables[1])[4:].abs().mean() > 0.01
    assert of_network.metrics["policy_network_unexplained_nats"] > 0


def test_what_is_told_and_delivered(learned: Artifact, chain: Chain) -> None:
    assert list(history(learned, "policy_network_unexplained_nats")) == [3]
    assert not [name for name in load(learned.file("latent.safetensors")) if "policy" in name]
    capture = history(learned, "outlier_capture")
    assert list(capture) == [1, 2, 3, 4]
    assert all(0 < share <= 1 for share in capture.values())
    export = CalibrateConfig(student_uri=str(chain.model))
    parents = {"student": learned, "profile": chain.profile, "traces": chain.traces}
    writer = writer_for(chain.folder, "calibrate", export, **parents)
    assert calibrate.run(export, **parents, bundle=writer)["export_difference_nats"] < export.tolerance


@pytest.mark.parametrize("stopped", [1, 2, 3])
def test_a_training_that_was_stopped_goes_on_as_if_it_had_not_been(stopped: int, chain: Chain) -> None:
    whole, begun, resumed = (training(chain, **SHORT, policy="attention").trainer for _ in range(3))

    def advance(trainer: Trainer, steps: int) -> None:
        for _ in range(steps):
            trainer.advance()

    advance(whole, 4)
    advance(begun, stopped)
    resumed.restore(begun.state())
    advance(resumed, 4 - stopped)
    assert whole.trained().keys() == resumed.trained().keys()
    assert all(torch.equal(p, resumed.trained()[name]) for name, p in whole.trained().items())
    assert all(torch.equal(p, resumed.ema.average[name]) for name, p in whole.ema.average.items())
    assert [point.values for point in whole.history] == [point.values for point in resumed.history]


def test_a_network_that_stood_still_becomes_no_table(chain: Chain) -> None:
    trainer = training(chain, **SHORT | {"policy_network_lr": 0.0}, policy="mlp").trainer
    for _ in range(2):
        trainer.advance()
    with pytest.raises(ValueError, match="policy network: has learned nothing yet"):
        trainer.advance()


def test_finer_steps_where_keys_are_long_are_where_training_begins(chain: Chain) -> None:
    plain, finer = (
        chain.distilled(**SHORT | {"warmup_steps": 0, "finetune_steps": 1}, k_norm_power=power) for power in (0.0, 2.0)
    )
    ratio_SP = (decode(finer.file("policy_table.bin")).scales() / decode(plain.file("policy_table.bin")).scales())[
        ..., 0
    ]
    around_attention = torch.tensor([True, True, False, False] * 2)
    assert ratio_SP[around_attention].min() < 0.98
    torch.testing.assert_close(ratio_SP[~around_attention], torch.ones(4, 13), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "table"}, "distill.policy 'table': allowed are lookup, mlp, attention"),
        (
            {"policy": "mlp", "warmup_steps": 0},
            "distill.policy 'mlp': is trained in the warm-up, and warmup_steps is 0",
        ),
        (
            {"policy": "mlp", "export": "best", "validate_every": 2},
            "distill.policy 'mlp': the best weights may be those of the warm-up, .* export ema or last",
        ),
        ({"policy_network_lr": -1.0}, "distill.policy_network_lr -1.0: must not be negative"),
        ({"k_norm_power": -0.5}, "distill.k_norm_power -0.5: must not be negative"),
        (
            {"k_norm_power": 0.5, "start_uri": "x"},
            "distill.k_norm_power 0.5: changes the profile's table, and start_uri",
        ),
    ],
)
def test_settings_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistillConfig(**options)


def test_without_a_table_there_is_nothing_to_correct(chain: Chain) -> None:
    with pytest.raises(ValueError, match="policy 'mlp': corrects a position table, and the model rounds without one"):
        training(chain, **SHORT, policy="mlp", activation="plain")
