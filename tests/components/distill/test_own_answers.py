"""Objectives over what the student wrote, through the trainer: draws with their log-probabilities, and particles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_chain
import torch
from tiny_chain import Chain
from tiny_training import training

from reflux.components.algorithms import losses
from reflux.components.algorithms.written_losses import WRITTEN_OBJECTIVES
from reflux.components.distill.config import DistillConfig
from reflux.components.distill.terms import OBJECTIVES, Term, parse

FULL = {"weight_bits": 16, "activation_bits": 16, "activation": "plain", "warmup_steps": 0, "joint_steps": 0,
        "weight_clip_lr": 0.0}  # fmt: skip
OWN = {"score_prompts": False, "trace_objective": "forward_kl"}


@pytest.fixture(scope="module")
def chain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return tiny_chain.make(tmp_path_factory.mktemp("chain"), tiny_model)


def history(chain: Chain, **options: Any) -> dict[str, list[float]]:
    """Metric -> its value at each step."""
    student = chain.distilled(**(OWN | options))
    values: dict[str, list[float]] = {}
    for row in student.table("training").to_pylist():
        values.setdefault(row["metric"], []).append(row["value"])
    return values


def test_sampled_reverse_kl_brings_the_student_nearer(chain: Chain) -> None:
    options = {"objective": "sampled_reverse_kl", "on_policy_fraction": 1.0, "batch_sequences": 6, "rollout_batch": 12,
               "warmup_steps": 0, "joint_steps": 0, "finetune_steps": 12, "checkpoint_every": 5}  # fmt: skip
    values = history(chain, **options)
    reverse = values["kl_reverse_nats"]
    assert sum(reverse[-4:]) < 0.9 * sum(reverse[:4])
    assert {"rollout_tokens", "truncation_rate", "student_mass_on_teacher_top"} <= values.keys()


@pytest.mark.parametrize("objective", ["sampled_reverse_kl + 0.5*skew_reverse_kl", "sharpening + forward_kl",
                                       "verifier + reverse_kl"])  # fmt: skip
def test_a_step_does_not_depend_on_the_micro_batch(chain: Chain, objective: str) -> None:
    options = FULL | OWN | {"objective": objective, "discount": 0.5, "sharpen_particles": 4, "rollout_batch": 8,
                            "batch_sequences": 8, "on_policy_fraction": 0.75}  # fmt: skip
    points = []
    for size in (8, 3, 1):
        trainer = training(chain, micro_batch_sequences=size, **options).trainer
        with torch.no_grad():
            for p in trainer.weights.values():
                p.mul_(1.05)  # a student that is not the teacher
        trainer.advance()
        points.append(trainer.history[0].values)
    for values in points[1:]:
        for name in ("scored_tokens", "loss_nats", "gradient_norm"):
            assert values[name] == pytest.approx(points[0][name], rel=1e-3), name


@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 0.9), (1.0, 1.0)])
def test_draws_come_with_the_log_probability_they_were_drawn_with(
    chain: Chain, temperature: float, top_p: float
) -> None:
    options = {"rollout_temperature": temperature, "rollout_top_p": top_p, "off_distribution": "renormalise"}
    trainer = training(chain, objective="sampled_reverse_kl", rollout_batch=4, **OWN, **options).trainer
    room = 6 + max(len(ids) for ids in trainer.rollouts.prompt_ids.values())
    taken = trainer.rollouts.take(4, batch=4, score_prompts=False, max_tokens=room)
    for sequence in taken:
        assert sequence.drawn_nats is not None
        assert len(sequence.drawn_nats) == sequence.scored
        assert max(sequence.drawn_nats) <= 0
        ids = torch.tensor([sequence.token_ids])
        with torch.no_grad():
            logits = trainer.student(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None]).logits[0, :-1]
        size = trainer.loss.student.vocab_size
        probability = (logits[sequence.first_scored - 1 :, :size] / temperature).softmax(-1)
        falling, order = probability.sort(descending=True)
        kept = (falling.cumsum(-1) - falling < top_p).float()
        probability = torch.zeros_like(probability).scatter(1, order, falling * kept)
        written = ids[0, sequence.first_scored :, None]
        expected = (probability / probability.sum(-1, keepdim=True)).gather(1, written)[:, 0].log()
        torch.testing.assert_close(torch.tensor(sequence.drawn_nats), expected, atol=1e-4, rtol=1e-4)


def test_particles_are_weighed_and_the_students_exponent_starts_at_one(chain: Chain) -> None:
    """In full precision the student starts as the teacher."""
    options = {"objective": "sharpening + forward_kl", "on_policy_fraction": 1.0, "sharpen_particles": 4,
               "sharpen_block_tokens": 5, "rollout_batch": 8, "batch_sequences": 8, "finetune_steps": 2}  # fmt: skip
    values = history(chain, **(FULL | options))
    assert values["sharpen_absorbed_exponent"][0] == pytest.approx(1.0, abs=1e-3)
    assert all(1 <= n < 4 for n in values["sharpen_effective_particles"])
    assert values["rollout_tokens"][0] <= 12
    assert values["loss_nats"][0] > 0


def test_weights_of_a_prompts_particles_are_one_on_average_and_kept_with_them(chain: Chain, tmp_path: Path) -> None:
    options = {"objective": "sharpening", "sharpen_particles": 4, "rollout_batch": 8}
    trainer = training(chain, **OWN, **options).trainer
    trainer.rollouts.take(1, batch=8, score_prompts=False, max_tokens=256)
    torch.save(trainer.rollouts.state(), tmp_path / "state.pt")
    other = training(chain, **OWN, **options).trainer.rollouts
    other.restore(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.waiting == trainer.rollouts.waiting
    assert len(other.waiting) == 7
    second = other.waiting[-4:]
    assert len({tuple(own.token_ids[: own.prompt_tokens]) for own in second}) == 1
    assert sum(own.weight for own in second) == pytest.approx(4)
    assert len({own.weight for own in second}) == 4  # one block, after which nothing is drawn again
    assert other.made == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "mse"}, "objective 'mse': 'mse' is no objective; allowed are beta_jsd, "),
        ({"objective": ""}, "objective '': '' is no objective"),
        ({"objective": "mse", "trace_objective": "forward_kl", "on_policy_fraction": 0.0}, "'mse' is no objective"),
        ({"objective": "0.5*beta_jsd - forward_kl"}, "'beta_jsd - forward_kl' is no objective"),
        ({"objective": "-1*beta_jsd"}, "the weight '-1' must be a positive number"),
        ({"objective": "nan*beta_jsd"}, "the weight 'nan' must be a positive number"),
        ({"objective": "half*beta_jsd"}, "the weight 'half' must be a positive number"),
        ({"objective": "beta_jsd + 2*beta_jsd"}, "beta_jsd is there twice"),
        ({"trace_objective": "mse"}, "trace_objective 'mse': 'mse' is no objective"),
        ({"objective": "next_token"}, "objective: next_token needs traces, and this is the objective on rollouts"),
        ({"objective": "sampled_reverse_kl", "score_prompts": False}, "needs rollouts, .* one in trace_objective"),
        ({"trace_objective": "sharpening"}, "trace_objective: sharpening needs rollouts"),
        ({"objective": "sharpening", "trace_objective": "forward_kl"}, "score_prompts True: sharpening is over what"),
        ({"objective": "sampled_reverse_kl", "rollout_top_p": 0.9, **OWN}, r"rollout_top_p \(1.0, 0.9\): .* is biased"),
        ({"objective": "sampled_reverse_kl", "rollout_temperature": 0.7, **OWN}, r"\(0.7, 1.0\): .* is biased"),
        (
            {"objective": "sampled_reverse_kl", "rollout_temperature": 0.0, "off_distribution": "renormalise", **OWN},
            "rollout_temperature 0: sampled_reverse_kl needs answers that were drawn",
        ),
        ({"objective": "sharpening", "rollout_top_p": 0.9, **OWN}, "a nucleus would take away support"),
        ({"objective": "sharpening", "rollout_batch": 24, **OWN}, "rollout_batch 24: must be a multiple of"),
        ({"objective": "sharpening + sampled_reverse_kl", **OWN}, "objective: sharpening weighs its answers"),
        ({"off_distribution": "ignore"}, "off_distribution 'ignore': allowed are refuse, renormalise"),
        ({"skew": 1.0}, r"skew 1\.0: must be in \[0, 1\)"),
        ({"discount": 1.5}, r"discount 1\.5: must be in \[0, 1\]"),
        ({"sharpen_alpha": 0.0}, r"sharpen_alpha 0\.0: must be positive"),
    ],
)  # fmt: skip
def test_an_objective_that_cannot_be_minimised_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^distill.*{message}"):
        DistillConfig(**options)


def test_every_objective_that_a_recipe_may_name_is_there() -> None:
    in_tables = losses.DISTRIBUTION_OBJECTIVES.keys() | WRITTEN_OBJECTIVES.keys()
    assert OBJECTIVES.keys() == in_tables | {"range_alignment", "bridge"}
    assert all(traits.parameter in ("", *vars(DistillConfig())) for traits in OBJECTIVES.values())


def test_what_a_recipe_may_write() -> None:
    assert parse("objective", "beta_jsd") == (Term(name="beta_jsd", weight=1.0),)
    assert parse("objective", "0.9*forward_kl+ 1e-1 *cross_entropy") == (
        Term(name="forward_kl", weight=0.9),
        Term(name="cross_entropy", weight=0.1),
    )
    off_policy = DistillConfig(objective="next_token", on_policy_fraction=0.0)
    assert off_policy.trace_terms == (Term(name="next_token"),)
    assert not off_policy.minimises("next_token")
