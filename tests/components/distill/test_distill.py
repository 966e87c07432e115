"""distill on the tiny model: the rules of its loss, its step and its resume, as properties of real training."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_chain
import torch
from safetensors.torch import load
from tiny_chain import Chain
from tiny_training import training

from reflux.components import progress
from reflux.components.algorithms.draws import Sampling, derive_seed
from reflux.components.algorithms.low_bit import frozen_weights
from reflux.components.algorithms.rollouts import Request, rollout
from reflux.components.artifacts import Artifact
from reflux.components.distill.config import DistillConfig
from reflux.components.distill.examples import Sequence
from reflux.components.distill.trainer import Trainer


@pytest.fixture(scope="module")
def chain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return tiny_chain.make(tmp_path_factory.mktemp("chain"), tiny_model)


@pytest.fixture(scope="module")
def whole(chain: Chain) -> Artifact:
    """Eight steps that nobody stopped."""
    return chain.distilled()


def gradient(trainer: Trainer, micro_batches: list[list[Sequence]]) -> tuple[float, dict[str, torch.Tensor]]:
    """Summed loss and gradient of every parameter, accumulated over the micro-batches."""
    for p in trainer.trained().values():
        p.requires_grad_(True)
        p.grad = None
    losses = [trainer.loss(sequences) for sequences in micro_batches]
    for loss in losses:
        loss.backward()
    grads = {name: p.grad.clone() for name, p in trainer.trained().items() if p.grad is not None}
    return sum(loss.item() for loss in losses), grads


def assert_same_gradient(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """To a thousandth of the largest entry: a value on a rounding border may fall to the other side elsewhere."""
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-3 * a[name].abs().max().item() + 1e-9)


@pytest.mark.parametrize("objective", ["beta_jsd", "reverse_kl"])
def test_loss_and_gradient_do_not_depend_on_the_micro_batch(chain: Chain, objective: str) -> None:
    held = training(chain, objective=objective, beta=0.3)
    sequences = [*held.traces[:4], *held.rollouts[4:8]]
    loss, grads = gradient(held.trainer, [sequences])
    assert loss > 0
    for size in (1, 2):
        split = [sequences[i : i + size] for i in range(0, 8, size)]
        other_loss, other_grads = gradient(held.trainer, split)
        assert other_loss == pytest.approx(loss, rel=1e-4)
        assert_same_gradient(grads, other_grads)


def test_a_step_reports_the_same_loss_and_norm_for_every_micro_batch(chain: Chain) -> None:
    points = []
    for size in (1, 2, 8):
        trainer = training(chain, batch_sequences=8, micro_batch_sequences=size, warmup_steps=0).trainer
        trainer.advance()
        points.append(trainer.history[0].values)
    for values in points[1:]:
        assert values["scored_tokens"] == points[0]["scored_tokens"]
        assert values["loss_nats"] == pytest.approx(points[0]["loss_nats"], rel=1e-4)
        assert values["gradient_norm"] == pytest.approx(points[0]["gradient_norm"], rel=1e-3)


def test_fifty_pad_tokens_change_nothing(chain: Chain) -> None:
    held = training(chain)
    trace, own = held.traces[0], held.rollouts[1]
    longest = max(len(trace.token_ids), len(own.token_ids))
    long = Sequence(token_ids=[5, *[6 + i % 90 for i in range(longest + 49)]], first_scored=longest + 49)
    loss, grads = gradient(held.trainer, [[trace, own], [long]])
    of_both, eos = held.trainer.loss, held.tokenizer.eos_token_id  # an EOS that is a label and one that is padding
    of_both.student, of_both.teacher = (replace(model, pad=eos) for model in (of_both.student, of_both.teacher))
    padded_loss, padded_grads = gradient(held.trainer, [[trace, own, long]])
    assert padded_loss == pytest.approx(loss, rel=1e-4)
    assert_same_gradient(grads, padded_grads)


def test_the_closing_eos_of_an_answer_is_scored(chain: Chain) -> None:
    held = training(chain)
    eos = held.tokenizer.eos_token_id
    without = Sequence(token_ids=[5, 9, 8, 7], first_scored=1)
    ended = Sequence(token_ids=[5, 9, 8, 7, eos], first_scored=1)
    with torch.no_grad():
        assert held.trainer.loss([ended]).item() > held.trainer.loss([without]).item()


def test_the_teacher_is_frozen_and_only_the_decoder_and_the_table_learn(chain: Chain) -> None:
    held = training(chain)
    _, grads = gradient(held.trainer, [[held.traces[0], held.rollouts[1]]])
    teacher = held.trainer.loss.teacher.model
    assert not teacher.training
    assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())
    assert grads.keys() == held.trainer.trained().keys()
    assert all(grad.abs().sum() > 0 for grad in grads.values())
    others = [p for name, p in held.trainer.student.named_parameters() if name not in grads]
    assert others
    assert all(p.grad is None for p in others)


def test_a_hard_sample_is_dealt_twice(chain: Chain) -> None:
    deck = training(chain, hard_weight=2).trainer.deck
    traces = chain.traces.table("traces", ["trace_id", "prompt_id", "split"]).to_pylist()
    times = {row["prompt_id"]: deck.names.count(row["trace_id"]) for row in traces if row["split"] == "train"}
    assert times.pop(tiny_chain.HARD) == 2
    assert set(times.values()) == {1}


def test_ema_starts_from_the_weights_and_follows_them(chain: Chain) -> None:
    trainer = training(chain, warmup_steps=0, joint_steps=0, on_policy_fraction=0.0, ema_decay=0.75).trainer
    before = {name: p.detach().clone() for name, p in trainer.trained().items()}
    assert trainer.ema.average.keys() == before.keys()
    assert all(torch.equal(trainer.ema.average[name], before[name]) for name in before)
    trainer.advance()
    for name, p in trainer.trained().items():
        torch.testing.assert_close(trainer.ema.average[name], 0.75 * before[name] + 0.25 * p.detach())
    assert any(not torch.equal(before[name], p) for name, p in trainer.weights.items())


def test_rollouts_come_through_the_quantised_forward(chain: Chain) -> None:
    held = training(chain, rollout_batch=4, rollout_new_tokens=30)
    buffer = held.trainer.rollouts
    names = training(chain, rollout_batch=4).trainer.rollouts.prompts.deal(4)
    made = [s.token_ids for s in buffer.take(4, batch=4, score_prompts=True, max_tokens=256)]

    def answers(model: Any) -> list[list[int]]:
        requests = [
            Request(prompt_token_ids=buffer.prompt_ids[name], seed=derive_seed(buffer.seed, "rollout", i))
            for i, name in enumerate(names)
        ]
        answered = rollout(
            model, requests, Sampling(temperature=1.0, top_p=1.0, max_new_tokens=30),
            eos_token_id=held.tokenizer.eos_token_id, vocab_size=len(held.tokenizer),
        )  # fmt: skip
        return [answer.prompt_token_ids + answer.response_token_ids for answer in answered]

    with frozen_weights(held.trainer.student):
        assert made == answers(held.trainer.student)
    assert made != answers(held.trainer.loss.teacher.model)  # the same weights in full precision


def test_each_phase_moves_its_own_parameters(whole: Artifact, chain: Chain) -> None:
    trainer = training(chain, on_policy_fraction=0.0, batch_sequences=1).trainer
    moved = []
    for _ in range(5):
        before = {name: p.detach().clone() for name, p in trainer.trained().items()}
        trainer.advance()
        moved.append({name for name, p in trainer.trained().items() if not torch.equal(p, before[name])})
    table, weights = set(trainer.policy), set(trainer.weights)
    last = {name for name in weights if name.startswith("model.layers.1.")}
    assert moved[0] == moved[1] == table  # warm-up
    assert moved[2] == moved[3] == table | last  # joint
    assert moved[4] == table | weights  # fine-tune
    phases = {row["step"]: row["phase"] for row in whole.table("training").to_pylist()}
    assert list(phases.values()) == ["warmup"] * 2 + ["joint"] * 2 + ["finetune"] * 4


def test_clipping_stays_where_it_is_unless_it_has_a_rate(chain: Chain) -> None:
    trainer = training(chain, on_policy_fraction=0.0, warmup_steps=0, joint_steps=0, weight_clip_lr=0.0).trainer
    trainer.advance()
    assert len(trainer.clipping) == 2 * 7
    assert not any(p.any() for p in trainer.clipping.values())


@pytest.mark.parametrize(("bits", "tolerance", "cosine"), [(16, 0.005, 0.99), (4, 0.05, 0.9)])
def test_bfloat16_passes_give_nearly_the_same_loss_and_gradient(
    chain: Chain, bits: int, tolerance: float, cosine: float
) -> None:
    """Of four bits less nearly: a value that bfloat16 moves over the middle of two codes moves by a whole step."""
    found = {}
    for name in ("float32", "bfloat16"):
        held = training(chain, compute_dtype=name, activation_bits=bits)
        found[name] = gradient(held.trainer, [held.traces[:3], held.rollouts[:3]])
        assert {p.dtype for p in held.trainer.trained().values()} == {torch.float32}
    (exact, grads), (narrow, narrow_grads) = found["float32"], found["bfloat16"]
    assert narrow != exact
    assert narrow == pytest.approx(exact, rel=tolerance)
    whole, narrow_whole = (torch.cat([g.flatten() for g in each.values()]) for each in (grads, narrow_grads))
    assert torch.cosine_similarity(whole, narrow_whole, dim=0) > cosine


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_the_run_before_it_moves_anything(chain: Chain, poison: float) -> None:
    trainer = training(chain, on_policy_fraction=0.0).trainer
    with torch.no_grad():
        trainer.student.model.norm.weight.fill_(poison)
    table = trainer.policy["policy.log_main_SP"].detach().clone()
    with pytest.raises(FloatingPointError, match="the loss of step 1 is nan"):
        trainer.advance()
    assert torch.equal(trainer.policy["policy.log_main_SP"], table)
    assert (trainer.step, trainer.history) == (0, [])


def test_a_saturated_table_stops_the_run(chain: Chain) -> None:
    trainer = training(chain, on_policy_fraction=0.0, warmup_policy_lr=100.0).trainer
    with pytest.raises(ValueError, match=r"policy saturated: main scale of layers\.\d\.\w+ at position"):
        trainer.advance()


def test_the_loss_falls(chain: Chain) -> None:
    held = training(chain, warmup_steps=0, joint_steps=0, finetune_steps=8, batch_sequences=8, on_policy_fraction=0.0)

    @torch.no_grad()
    def loss() -> float:
        return held.trainer.loss(held.traces).item()

    before = loss()
    for _ in range(8):
        held.trainer.advance()
    assert loss() < 0.8 * before


def test_a_student_comes_with_its_history_and_says_what_it_is(whole: Artifact) -> None:
    assert whole.metrics["steps"] == 8
    assert {f"validation_loss_{name}_nats" for name in ("before", "last", "ema")} <= whole.metrics.keys()
    rows = whole.table("training").to_pylist()
    assert {"kl_forward_nats", "kl_reverse_nats", "student_entropy_nats", "top_overlap", "rollout_loop_rate"} <= {
        row["metric"] for row in rows
    }
    scored = [row["value"] for row in rows if row["metric"] == "scored_tokens"]
    assert len(scored) == len(whole.table("training_times")) == 8
    names = set(load(whole.file("latent.safetensors")))
    assert all(name.startswith("model.layers.") for name in names)
    assert json.loads(whole.file("scheme.json"))["activation"] == "dual"


def test_no_validation_and_no_average_are_not_reported_as_zero(chain: Chain) -> None:
    plain = chain.distilled(max_steps=1, activation="plain", validation_traces=0, ema_decay=0.0, export="last")
    assert not [name for name in plain.metrics if name.startswith("validation")]
    some = chain.distilled(max_steps=1, activation="plain", ema_decay=0.0, export="last")
    assert {name for name in some.metrics if name.startswith("validation")} == {
        "validation_loss_before_nats",
        "validation_loss_last_nats",
    }


def test_last_and_ema_are_exported_by_name(whole: Artifact, chain: Chain) -> None:
    last = chain.distilled(export="last")
    assert last.metrics == whole.metrics  # the same training, validated both ways
    ema, final = (load(artifact.file("latent.safetensors")) for artifact in (whole, last))
    assert any(not torch.equal(ema[name], final[name]) for name in ema)


def test_a_plain_scheme_trains_without_a_table_and_a_cap_keeps_the_proportions(chain: Chain) -> None:
    student = chain.distilled(activation="plain", max_steps=3, on_policy_fraction=0.0)
    phases = {row["step"]: row["phase"] for row in student.table("training").to_pylist()}
    assert phases == {1: "joint", 2: "finetune", 3: "finetune"}
    assert [shard.name for shard in student.shards("policy_table.bin")] == []


class InterruptedRunError(Exception):
    """Stands for whatever stops a process."""


def test_four_and_four_steps_are_eight_to_the_last_bit(whole: Artifact, chain: Chain) -> None:
    def interrupt(points: list[progress.MetricPoint]) -> None:
        seen.extend(point.step for point in points)
        if len(seen) == 4:
            raise InterruptedRunError

    seen: list[int] = []
    with progress.listening(interrupt), pytest.raises(InterruptedRunError):
        chain.distilled(store="resumed", checkpoint_every=4)
    assert seen == [1, 2, 3, 4]
    with progress.listening(interrupt):
        resumed = chain.distilled(store="resumed", checkpoint_every=4)
    assert seen == [1, 2, 3, 4, 1, 2, 3, 4, 5, 6, 7, 8]  # points are told again, with the times of the checkpoint
    assert resumed.digest == whole.digest
    assert resumed.key == whole.key
    assert resumed.metrics == whole.metrics


def test_rollouts_made_and_not_used_survive_a_checkpoint(chain: Chain, tmp_path: Path) -> None:
    trainer = training(chain, rollout_batch=3, batch_sequences=4).trainer
    trainer.advance()
    assert len(trainer.rollouts.waiting) == 1
    other = training(chain, rollout_batch=3, batch_sequences=4).trainer
    torch.save(trainer.state(), tmp_path / "state.pt")
    other.restore(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.rollouts.waiting == trainer.rollouts.waiting
    trainer.advance()
    other.advance()
    assert trainer.history[1].values == other.history[1].values
    assert all(torch.equal(p, other.trained()[name]) for name, p in trainer.trained().items())


def test_killed_between_checkpoints_and_called_again_it_ends_with_the_same_digest(
    whole: Artifact, chain: Chain, tmp_path: Path
) -> None:
    store = tmp_path / "killed"
    shutil.copytree(chain.folder / "objects", store / "objects", ignore=shutil.ignore_patterns("distill"))
    command = [sys.executable, "-m", "reflux.components", "distill", "--store", str(store), "--run", "kill",
               "--out-student", str(tmp_path / "student.json"), "--checkpoint-every", "3"]  # fmt: skip
    for name, parent in {"traces": chain.traces, "profile": chain.profile, "labels": chain.labels}.items():
        (tmp_path / f"{name}.json").write_bytes(parent.bytes)
        command += [f"--{name}", str(tmp_path / f"{name}.json")]
    for name, value in vars(chain.training()).items():
        if name != "checkpoint_every" and value != getattr(DistillConfig(), name):
            command += [f"--{name.replace('_', '-')}", str(value)]
    environment = os.environ | {"MLFLOW_TRACKING_URI": "", "OMP_NUM_THREADS": "1", "REFLUX_PROGRESS": "json"}

    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as killed:
        for _ in _until(killed):
            if any(store.rglob("distill/*/checkpoints/*3/checkpoint.json")):
                break
        killed.send_signal(signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL
    assert not list(store.rglob("distill/*/manifest.json"))

    again = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    assert '"done": 0' not in again.stdout
    assert '"done": 8' in again.stdout
    assert again.stdout.endswith(f"{whole.digest}\n")


def _until(process: subprocess.Popen) -> Iterator[None]:
    """A look every few milliseconds, until the process ends."""
    while process.poll() is None:
        yield
        time.sleep(0.005)
