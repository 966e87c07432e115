"""The schedule that watches itself: a warm-up that ends when it no longer helps, the teacher's share, and a table that
has stopped learning.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_chain
import torch
from tiny_chain import Chain
from tiny_training import training

from reflux.components.distill import stage
from reflux.components.distill.config import DistillConfig
from reflux.components.distill.guard import NEAR_ZERO, STILL_STEPS, policy_health
from reflux.components.progress import MetricPoint


@pytest.fixture(scope="module")
def chain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return tiny_chain.make(tmp_path_factory.mktemp("chain"), tiny_model)


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_the_warm_up_ends_when_the_activation_kl_stops_falling(chain: Chain, fraction: float) -> None:
    """At a rate that moves nothing it has nothing to wait for."""
    options = {"warmup_steps": 30, "warmup_policy_lr": 1e-12, "warmup_patience": 2, "on_policy_fraction": fraction}
    trainer = training(chain, **options).trainer
    assert trainer.total == 30 + 2 + 4
    while trainer.phases[0].steps == 30 and trainer.step < 30:
        trainer.advance()
    assert 4 <= trainer.step == trainer.phases[0].steps < 30
    assert trainer.total == trainer.step + 2 + 4
    kl = [point.values["activation_kl_nats"] for point in trainer.history]
    assert sum(kl[-2:]) >= sum(kl[-4:-2])

    other = training(chain, **options).trainer
    other.restore(trainer.state())
    assert other.phases == trainer.phases
    other.advance()
    assert other.history[-1].values["student_lr"] > 0  # the joint phase


def test_without_patience_it_has_the_steps_that_were_asked_for(chain: Chain) -> None:
    trainer = training(chain, warmup_steps=8, warmup_policy_lr=1e-12, on_policy_fraction=0.0).trainer
    for _ in range(8):
        trainer.advance()
    assert trainer.phases[0].steps == 8


@pytest.mark.slow
def test_the_history_of_a_student_knows_where_its_warm_up_ended(chain: Chain) -> None:
    student = chain.distilled(warmup_steps=30, warmup_policy_lr=1e-12, warmup_patience=2)
    rows = student.table("training").to_pylist()
    phases = {row["step"]: row["phase"] for row in rows}
    warm = [*phases.values()].count("warmup")
    assert 4 <= warm < 30
    assert [*phases.values()] == ["warmup"] * warm + ["joint"] * 2 + ["finetune"] * 4
    assert student.metrics["steps"] == warm + 6


def test_skipping_the_warm_up_is_remarked_on() -> None:
    skipped = DistillConfig(warmup_steps=0)
    assert "made published runs collapse" in stage.remarks(skipped, profiled_policy=True)[0]
    assert not stage.remarks(skipped, profiled_policy=False)
    assert not stage.remarks(DistillConfig(), profiled_policy=True)


def test_on_traces_the_rest_of_the_teachers_weight_is_hard_targets(chain: Chain) -> None:
    held, hard = training(chain, objective="forward_kl"), training(chain, trace_objective="next_token")
    with torch.no_grad():
        loss, traces, own = held.trainer.loss, held.traces[:3], held.rollouts[:3]
        whole, targets = loss(traces).item(), hard.trainer.loss(traces).item()
        assert loss(traces, teacher_weight=0.3).item() == pytest.approx(0.3 * whole + 0.7 * targets, rel=1e-4)
        assert loss(own, teacher_weight=0.3).item() == pytest.approx(loss(own).item(), rel=1e-5)


def test_each_phase_has_its_own_weight_of_the_teacher(chain: Chain) -> None:
    options = {"warmup_teacher_weight": 0.3, "joint_teacher_weight": 0.5, "joint_teacher_weight_end": 0.7,
               "finetune_teacher_weight": 0.8, "joint_steps": 3, "finetune_steps": 1}  # fmt: skip
    trainer = training(chain, on_policy_fraction=0.0, **options).trainer
    for _ in range(6):
        trainer.advance()
    weights = [point.values["teacher_weight"] for point in trainer.history]
    assert weights == pytest.approx([0.3, 0.3, 0.5, 0.6, 0.7, 0.8])


@pytest.mark.parametrize(("clip", "norm"), [(0.0, 1e-2), (1e-3, 1e-3)])
def test_the_joint_phase_may_clip_gradients_at_another_norm(chain: Chain, clip: float, norm: float) -> None:
    trainer = training(
        chain, on_policy_fraction=0.0, warmup_steps=0, gradient_clip=1e-2, joint_gradient_clip=clip
    ).trainer
    trainer.advance()
    assert trainer.history[0].values["gradient_norm"] > 1e-2
    moments = [state["exp_avg"] for state in trainer.optimizer.state.values()]
    found = torch.nn.utils.get_total_norm(moments).item() / 0.1  # of AdamW: a tenth of the first gradient
    assert found == pytest.approx(norm, rel=1e-3)


def point(**values: float) -> MetricPoint:
    return MetricPoint(step=1, time_ms=0, values=values)


def test_a_table_without_gradients_is_counted_and_then_ends_the_run() -> None:
    parameter, scales = torch.nn.Parameter(torch.zeros(3)), torch.tensor([0.005, 0.5, 20.0, 1.0])
    history: list[MetricPoint] = []
    for count in range(1, STILL_STEPS):
        found = policy_health([parameter], scales, history)
        assert found == {"policy_gradient_norm": 0.0, "policy_still_steps": count, "policy_saturated_share": 0.5}
        history += [point(**found), point(loss_nats=1.0)]  # and a step in which it was not to move
    with pytest.raises(ValueError, match=f"no gradient has reached the position table for {STILL_STEPS} steps"):
        policy_health([parameter], scales, history)
    parameter.grad = torch.full((3,), 2 * NEAR_ZERO)
    assert policy_health([parameter], scales, history)["policy_still_steps"] == 0
    assert policy_health([parameter.requires_grad_(False)], scales, history) == {}


def test_a_table_that_learns_has_a_gradient_far_from_zero(chain: Chain) -> None:
    trainer = training(chain).trainer
    for _ in range(3):
        trainer.advance()
    for values in (p.values for p in trainer.history):
        assert values["policy_gradient_norm"] > 1e3 * NEAR_ZERO
        assert values["policy_still_steps"] == 0


def test_a_run_whose_table_is_cut_off_ends(chain: Chain) -> None:
    """As where fake quantisation is left off while training: nothing that is minimised depends on the table."""
    trainer = training(chain, warmup_steps=30, on_policy_fraction=0.0, micro_batch_sequences=4).trainer
    trainer.student.rounds_activations = False
    with torch.no_grad():
        trainer.student.model.norm.weight.requires_grad_(True)  # something that the loss can reach
    for _ in range(STILL_STEPS - 1):
        trainer.advance()
    with pytest.raises(ValueError, match="no gradient has reached the position table"):
        trainer.advance()
