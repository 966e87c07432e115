"""The losses that see more than next-token distributions, bridge and range alignment, through the trainer's own loss:
against numpy in float64 from both models' own forward, and by the rules that hold for every objective.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_chain
import torch
from tiny_chain import Chain
from tiny_model import save_tiny_model
from tiny_training import Training, training

from reflux.components import models
from reflux.components.algorithms.low_bit import decoder_layers
from reflux.components.distill.config import DistillConfig
from reflux.components.distill.examples import Sequence
from reflux.components.distill.objective import DistillationLoss
from reflux.components.distill.observed import Observed

STILL = {"warmup_steps": 0, "joint_steps": 0}


@pytest.fixture(scope="module")
def chain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return tiny_chain.make(tmp_path_factory.mktemp("chain"), tiny_model)


@torch.no_grad()
def forward(model: Any, sequence: Sequence) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of all layers [L, scored, D] and logits [scored, P] in float64, of one sequence alone."""
    kept: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda module, args, out: kept.append(out[0] if isinstance(out, tuple) else out))
        for layer in decoder_layers(model)
    ]
    ids_BT = torch.tensor([sequence.token_ids])
    logits_BTP = model(input_ids=ids_BT, position_ids=torch.arange(ids_BT.shape[1])[None]).logits
    for hook in hooks:
        hook.remove()
    rows = slice(sequence.first_scored - 1, -1)
    return torch.stack([h[0, rows] for h in kept]).double().numpy(), logits_BTP[0, rows].double().numpy()


def errors(held: Training, sequence: Sequence) -> np.ndarray:
    """[L, scored] squared and relative."""
    (student, _), (teacher, _) = (forward(m, sequence) for m in (held.trainer.student, held.trainer.loss.teacher.model))
    return ((student - teacher) ** 2).sum(-1) / (teacher**2).sum(-1)


def value(held: Training, sequences: list[Sequence]) -> float:
    with torch.no_grad():
        return held.trainer.loss(sequences).item()


@pytest.mark.parametrize("fraction", [0.2, 1.0])
def test_the_bridge_is_the_error_at_the_worst_places_of_each_sequence(chain: Chain, fraction: float) -> None:
    held = training(chain, objective="bridge", bridge_fraction=fraction)
    for sequences in (held.rollouts[:3], held.traces[:3], [*held.rollouts[:2], *held.traces[2:4]]):
        expected = 0.0
        for sequence in sequences:
            flat = np.sort(errors(held, sequence).ravel())[::-1]
            expected += sequence.scored * flat[: math.ceil(fraction * len(flat))].mean()
        assert value(held, sequences) == pytest.approx(expected, rel=1e-3)


def test_weights_are_those_of_each_kind_of_sequence(chain: Chain) -> None:
    alone, plain = (training(chain, objective=name) for name in ("bridge", "forward_kl"))
    mixed = training(chain, objective="forward_kl + 0.5*bridge", trace_objective="forward_kl")
    own, traces = alone.rollouts[:2], alone.traces[2:4]
    assert value(mixed, own) == pytest.approx(value(plain, own) + 0.5 * value(alone, own), rel=1e-4)
    assert value(mixed, traces) == pytest.approx(value(plain, traces), rel=1e-5)
    assert value(mixed, [*own, *traces]) == pytest.approx(value(mixed, own) + value(mixed, traces), rel=1e-4)


@pytest.mark.parametrize("objective", ["bridge", "forward_kl + 0.3*bridge + 1e-5*range_alignment"])
def test_a_step_does_not_depend_on_the_micro_batch(chain: Chain, objective: str) -> None:
    points = []
    for options in ({"micro_batch_sequences": 8}, {"micro_batch_sequences": 3}, {"packing": True}):
        trainer = training(chain, objective=objective, batch_sequences=8, **STILL, **options).trainer
        trainer.advance()
        points.append(trainer.history[0].values)
    for values in points[1:]:
        for name in ("loss_nats", "gradient_norm"):
            assert values[name] == pytest.approx(points[0][name], rel=2e-3), name


@pytest.mark.slow
def test_training_on_it_brings_the_layers_nearer(chain: Chain) -> None:
    held = training(chain, objective="bridge", on_policy_fraction=0.0, batch_sequences=8, finetune_steps=10, **STILL)
    before = value(held, held.traces)
    for _ in range(10):
        held.trainer.advance()
    assert value(held, held.traces) < 0.9 * before


def test_what_cannot_be_scored_costs_nothing(chain: Chain) -> None:
    held, too_long = training(chain, objective="bridge"), Sequence(token_ids=[5, 6, 7], first_scored=7)
    observed = Observed()
    loss = held.trainer.loss([too_long], observed)
    assert loss.item() == 0
    assert not [name for name in observed.means() if name.startswith("error_")]
    own = held.rollouts[:1]
    assert value(held, [too_long, *own]) == pytest.approx(value(held, own), rel=1e-4)


@pytest.mark.parametrize("objective", ["forward_kl", "bridge"])
def test_growth_with_depth_and_along_the_answer_is_reported(chain: Chain, objective: str) -> None:
    held, observed = training(chain, objective=objective), Observed()
    sequences = [Sequence(token_ids=s.token_ids[:21], first_scored=1) for s in held.rollouts[:3]]
    held.trainer.loss(sequences, observed)
    error = np.sqrt(np.stack([errors(held, s) for s in sequences], 1))  # [L, S, 20]
    expected = {
        "error_first_layer": error[0].mean(),
        "error_last_layer": error[-1].mean(),
        "error_first_quarter": error[-1][:, :5].mean(),
        "error_last_quarter": error[-1][:, 15:].mean(),
    }
    found = {name: mean for name, mean in observed.means().items() if name in expected}
    assert found == pytest.approx(expected, rel=1e-3)
    assert observed.means()["activation_kl_nats"] > 0


def test_a_teacher_of_another_shape_has_no_layers_to_compare(chain: Chain, tmp_path: Path) -> None:
    held, deep = training(chain), models.load_model(save_tiny_model(tmp_path / "deep", layers=3))

    def loss(**options: Any) -> DistillationLoss:
        return DistillationLoss(held.trainer.student, deep, held.tokenizer, DistillConfig(**options))

    for options in ({"objective": "forward_kl + bridge"}, {"warmup_patience": 2}):
        with pytest.raises(ValueError, match="compare hidden states, and teacher and student differ"):
            loss(**options)
    observed = Observed()
    loss(objective="forward_kl")(held.rollouts[:1], observed)
    assert "kl_forward_nats" in observed.means()
    assert "error_last_layer" not in observed.means()


def aligned(student: np.ndarray, teacher: np.ndarray, kept: Callable[[np.ndarray], np.ndarray]) -> float:
    target = np.clip(teacher - teacher.max(-1, keepdims=True), -14, 0)
    each = (target - (student - student.max(-1, keepdims=True))) ** 2
    return np.take_along_axis(each, kept(teacher), -1).sum()


def test_range_alignment_is_over_all_logits_of_a_live_teacher_and_the_kept_ones_of_a_stored(chain: Chain) -> None:
    held = training(chain, objective="range_alignment", weight_clip_lr=0.0)
    size, own, traces = len(held.tokenizer), held.rollouts[:2], held.traces[2:4]
    both = held.trainer.student, held.trainer.loss.teacher.model
    logits = {s: [forward(m, own[s])[1][:, :size] for m in both] for s in range(2)}
    expected = sum(aligned(*logits[s], lambda t: np.argsort(-t, -1)) for s in range(2))
    assert value(held, own) == pytest.approx(expected, rel=2e-3)
    k = traces[0].teacher.token_ids_TK.shape[1]
    logits = {s: [forward(m, traces[s])[1][:, :size] for m in both] for s in range(2)}
    expected = sum(aligned(*logits[s], lambda t: np.argsort(-t, -1)[:, :k]) for s in range(2))
    assert value(held, traces) == pytest.approx(expected, rel=2e-2)  # log-probabilities are stored in float16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bridge_fraction": 0.0}, r"bridge_fraction 0\.0: must be in \(0, 1\]"),
        ({"bridge_fraction": 1.5}, r"bridge_fraction 1\.5: must be in \(0, 1\]"),
        ({"alignment_width": 0.0}, r"alignment_width 0\.0: must be positive"),
        ({"joint_teacher_weight": 1.2}, r"joint_teacher_weight 1\.2: must be in \[0, 1\]"),
        ({"warmup_patience": -1}, "warmup_patience -1: must not be negative"),
    ],
)
def test_a_bad_number_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^distill.{message}"):
        DistillConfig(**options)
