"""What people look for in a trainer: adapters, packing, recomputed layers, early stop, best weights, answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_chain
import torch
from safetensors.torch import load
from stage_writers import writer_for
from step_in_processes import trainer_of
from tiny_chain import Chain
from torch.utils._python_dispatch import TorchDispatchMode

from reflux.components.algorithms.low_bit import LowBitLinear, frozen_weights
from reflux.components.bundles import policy_table
from reflux.components.calibrate import stage as calibrate
from reflux.components.calibrate.config import CalibrateConfig
from reflux.components.distill.adapters import MARK, latent_weights
from reflux.components.distill.config import DistillConfig
from reflux.components.distill.examples import Sequence
from reflux.components.distill.student import make_student
from reflux.components.distill.trainer import Trainer
from reflux.components.distill.validation import validation_loss
from reflux.components.models import load_model
from reflux.components.sequences import packed, padded

QUICK: dict[str, Any] = {"warmup_steps": 0, "joint_steps": 0, "on_policy_fraction": 0.0}


@pytest.fixture(scope="module")
def chain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return tiny_chain.make(tmp_path_factory.mktemp("chain"), tiny_model)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def gradient(trainer: Trainer) -> tuple[float, dict[str, torch.Tensor]]:
    """Of six sequences of different length, half of them scored by the live teacher."""
    traces = sorted(trainer.traces.values(), key=lambda s: len(s.token_ids))[:6]
    sequences = [
        *traces[::2],
        *(Sequence(token_ids=s.token_ids[: 9 + 11 * n], first_scored=1) for n, s in enumerate(traces[1::2])),
    ]
    for p in trainer.trained().values():
        p.requires_grad_(True)
    loss, _ = trainer._accumulate(sequences, sum(s.scored for s in sequences))
    return loss, {name: p.grad for name, p in trainer.trained().items() if p.grad is not None}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], share: float) -> None:
    """To a share of the largest entry."""
    assert ours.keys() == theirs.keys()
    for name, grad in ours.items():
        torch.testing.assert_close(theirs[name], grad, rtol=0, atol=share * grad.abs().max().item() + 1e-9)


def test_packed_rows_have_the_loss_and_gradient_of_padded_ones(chain: Chain) -> None:
    (loss, grads), (of_packed, packed_grads) = (
        gradient(trainer_of(chain, packing=packing, micro_batch_sequences=6)) for packing in (False, True)
    )
    assert of_packed == pytest.approx(loss, rel=1e-4)
    same(grads, packed_grads, 1e-3)


def test_packing_needs_fewer_places_for_the_same_tokens() -> None:
    sequences = [[7] * length for length in (3, 40, 11, 25, 8, 39, 2)]
    input_RT, position_RT, places = packed(sequences, 0, 64)
    tokens = sum(map(len, sequences))
    assert input_RT.numel() <= 1.1 * tokens < padded(sequences, 0)[0].numel() == 7 * 40
    assert input_RT.shape[1] <= 64
    assert packed(sequences, 0, 8)[0].shape[1] == 40  # no row is shorter than the longest sequence
    assert int((input_RT == 7).sum()) == tokens
    for ids, (row, begin) in zip(sequences, places, strict=True):
        assert position_RT[row, begin : begin + len(ids)].tolist() == [*range(len(ids))]
        assert input_RT[row, begin : begin + len(ids)].tolist() == ids


def test_recomputed_layers_change_no_bit_and_keep_less(chain: Chain) -> None:
    found = {}
    for recompute in ("none", "selective", "full"):
        trainer = trainer_of(chain, activation_checkpointing=recompute)
        saved: list[int] = []

        def count(tensor: torch.Tensor, saved: list[int] = saved) -> torch.Tensor:
            saved.append(tensor.untyped_storage().nbytes())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor), Products() as products:
            found[recompute] = (*gradient(trainer), sum(saved), products.count)
    loss, grads, kept, products_done = found["none"]
    for recompute in ("selective", "full"):
        assert found[recompute][0] == loss
        same(grads, found[recompute][1], 0.0)
        assert found[recompute][2] < kept / 2  # beside the products that `selective` keeps
    assert found["selective"][3] == products_done < found["full"][3]


def test_adapters_alone_move_and_are_merged_before_rounding(chain: Chain) -> None:
    trainer = trainer_of(chain, **QUICK, lora_rank=4, weight_clip_lr=0.0, weight_decay=0.0)
    before = {name: p.detach().clone() for name, p in trainer.student.named_parameters()}
    trainer.advance()  # A has no gradient while B is zero
    moved = {name for name, p in trainer.student.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {name for name in before if name.endswith(f"{MARK}B")} | {"policy.log_main_SP"}
    trainer.advance()
    assert any(not torch.equal(p, before[name]) for name, p in trainer.weights.items() if name.endswith(f"{MARK}A"))

    merged = make_student(replace(trainer.config, lora_rank=0), load_model(chain.model), trainer.student.policy)
    merged.load_state_dict(latent_weights(trainer.student), strict=False)
    for name, module in merged.named_modules():
        if isinstance(module, LowBitLinear):
            assert torch.equal(module.rounded(), trainer.student.get_submodule(name).rounded())
    ids_BT = torch.tensor([next(iter(trainer.traces.values())).token_ids])
    inputs = {"input_ids": ids_BT, "position_ids": torch.arange(ids_BT.shape[1])[None]}
    with torch.no_grad(), frozen_weights(trainer.student):
        assert torch.equal(merged(**inputs).logits, trainer.student(**inputs).logits)


def test_the_teacher_stands_still_whatever_adapters_the_student_carries(chain: Chain) -> None:
    trainer = trainer_of(chain, warmup_steps=0, joint_steps=0, on_policy_fraction=1.0, lora_rank=2)
    teacher = trainer.loss.teacher.model
    before = {name: p.clone() for name, p in teacher.named_parameters()}
    trainer.advance()
    assert not teacher.training
    assert not [name for name, p in teacher.named_parameters() if p.requires_grad or p.grad is not None]
    assert not [name for name in before if MARK in name]
    assert all(torch.equal(p, before[name]) for name, p in teacher.named_parameters())


def test_targets_that_the_student_does_not_have(chain: Chain) -> None:
    with pytest.raises(ValueError, match=r"lora_targets 'c_attn': no linear layer of .*; it has down_proj, gate_proj"):
        trainer_of(chain, lora_rank=2, lora_targets=["q_proj", "c_attn"])
    assert len(trainer_of(chain, lora_rank=2, lora_targets=["q_proj"], weight_clip_lr=0.0).weights) == 2 * 2 + 2 * 7


def test_a_student_with_adapters_is_exported_as_it_was_trained(chain: Chain) -> None:
    config = chain.training(**QUICK, lora_rank=2, finetune_steps=2, finetune_student_lr=1e-2)
    student = chain.distilled(**QUICK, lora_rank=2, finetune_steps=2, finetune_student_lr=1e-2)
    assert not [name for name in load(student.file("latent.safetensors")) if MARK in name]
    export = CalibrateConfig(student_uri=config.student_uri)
    parents = {"student": student, "profile": chain.profile, "traces": chain.traces}
    writer = writer_for(chain.folder, "calibrate", export, **parents)
    assert calibrate.run(export, **parents, bundle=writer)["export_difference_nats"] < export.tolerance


def test_training_ends_when_validation_no_longer_improves_and_the_best_is_exported(chain: Chain) -> None:
    """At a rate that rises until it harms."""
    options = QUICK | {"finetune_steps": 12, "rise_steps": 12, "finetune_student_lr": 0.1, "validate_every": 2}
    stopped = chain.distilled(**options, ema_decay=0.0, patience=1, export="best")
    rows = stopped.table("training").to_pylist()
    seen = {row["step"]: row["value"] for row in rows if row["metric"] == "validation_loss_nats"}
    best = int(stopped.metrics["validation_best_step"])
    assert stopped.metrics["steps"] == best + 2 < 12
    assert [*seen] == [*range(2, best + 3, 2)]
    assert min(seen.values()) == seen[best] == stopped.metrics["validation_loss_best_nats"]

    trainer = trainer_of(chain)
    policy = policy_table.decode(stopped.file("policy_table.bin"))
    exported = load(stopped.file("latent.safetensors")) | {"policy.log_main_SP": policy.log_main_SP}
    trainer.student.load_state_dict(exported, strict=False)
    kept_back = [*trainer.traces.values()][:2]
    assert validation_loss(trainer.loss, kept_back, 4) == pytest.approx(seen[best], rel=1e-5)


def test_the_best_weights_survive_a_kill(chain: Chain) -> None:
    options = QUICK | {"finetune_steps": 6, "validate_every": 2, "export": "best", "finetune_student_lr": 1e-1}
    whole = chain.distilled(**options)
    again = chain.distilled(**options, store="again", checkpoint_every=1)
    assert whole.digest == again.digest


def test_answers_are_there_to_read_and_change_nothing(chain: Chain, capsys: pytest.CaptureFixture[str]) -> None:
    plain = chain.distilled(**QUICK, finetune_steps=4)
    shown = chain.distilled(**QUICK, finetune_steps=4, store="shown", generations_every=2, generation_prompts=3)
    assert shown.digest == plain.digest
    rows = shown.table("training_generations").to_pylist()
    assert [row["step"] for row in rows] == [2, 2, 2, 4, 4, 4]
    assert [row["trace_id"] for row in rows[:3]] == [row["trace_id"] for row in rows[3:]]
    assert "What is" in rows[0]["prompt"]
    assert all(0 < row["answer_tokens"] <= 12 for row in rows)
    assert capsys.readouterr().out.count("step 4: user What is") == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"export": "best"}, "distill.export 'best': needs validate_every and validation_traces above 0"),
        ({"patience": 3}, "distill.patience 3: needs validate_every"),
        ({"validate_every": 2, "validation_traces": 0}, "distill.validate_every 2: needs validation_traces above 0"),
        ({"rollout_temperature": -0.1}, "distill.rollout_temperature -0.1: must not be negative"),
        ({"rollout_top_p": 0.0}, r"distill.rollout_top_p 0\.0: must be in \(0, 1\]"),
        ({"lora_targets": ["q_proj"]}, r"distill.lora_targets \['q_proj'\]: adapters need a lora_rank above 0"),
        ({"lora_rank": 4, "weight_bits": 16}, "distill.lora_rank 4: adapters are merged .* weight_bits is 16"),
        ({"lora_rank": -1}, "distill.lora_rank -1: must not be negative"),
        ({"lora_rank_stabilised": True}, "distill.lora_rank_stabilised True: adapters need a lora_rank above 0"),
        (
            {"weight_clip_lr": 5e-3, "weight_bits": 16},
            r"distill.weight_clip_lr 0\.005: at 16 weight_bits no weight has",
        ),
        (
            {"weight_clip_lr": 5e-3, "weight_bits": 16, "exceptions": ["down_proj=16"]},
            "distill.weight_clip_lr .* no weight",
        ),
        ({"final_rate": 0.0}, r"distill.final_rate 0\.0: must be in \(0, 1\]"),
        ({"rollout_new_tokens": 256}, "distill.rollout_new_tokens 256: must be below max_sequence_tokens, 256, which"),
        ({"parallelism": "tensor"}, "distill.parallelism 'tensor': allowed are ddp, fsdp2"),
        ({"device": "tpu"}, "distill.device 'tpu': allowed are cpu, cuda, auto"),
        ({"memory_gib": -2.0}, "distill.memory_gib -2.0: must not be negative"),
    ],
)
def test_settings_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistillConfig(**options)


def test_settings_that_do_go_together(chain: Chain) -> None:
    DistillConfig(weight_clip_lr=5e-3, weight_bits=16, exceptions=["down_proj=4"])
    DistillConfig(on_policy_fraction=0.0, rollout_new_tokens=256)
    DistillConfig(rollout_new_tokens=255)
    with pytest.raises(ValueError, match=r"distill.weight_clip_lr 0\.01: no weight is rounded, so no grid has an end"):
        trainer_of(chain, weight_bits=16, exceptions=["down_in=8"], weight_clip_lr=0.01)  # which rounds activations


def test_a_step_that_does_not_divide_among_the_processes(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=r"distill.batch_sequences 4: must be a multiple of the 3 processes"):
        chain.distilled(store="three")
    assert not (chain.folder / "three" / "objects").exists()
