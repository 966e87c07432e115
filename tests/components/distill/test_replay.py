"""A step whose loss or gradient is not finite is kept, and made again with the place where that begins."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_chain
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from stage_writers import writer_for
from step_in_processes import trainer_of
from tiny_chain import Chain

from reflux.components.distill import stage
from reflux.components.distill.replay import keep, read
from reflux.components.distill.trainer import NotFiniteError
from reflux.components.storage import Store
from reflux.pipelines.__main__ import cli

NORM = "model.layers.1.post_attention_layernorm"


@pytest.fixture(scope="module")
def chain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return tiny_chain.make(tmp_path_factory.mktemp("chain"), tiny_model)


def poisoned(model: Path, folder: Path, weight: str, value: float) -> Path:
    """A copy of the model with one value that a broken file could hold, in a norm: in a weight that is rounded it is
    refused before training.
    """
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[weight][3] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def failed(chain: Chain, student: Path, store: Path, message: str = "", **options: object) -> str:
    """Where the step is kept that this student's training could not make."""
    config = replace(chain.training(**{"on_policy_fraction": 0.0} | options), student_uri=str(student))
    parents = {"traces": chain.traces, "profile": chain.profile, "labels": chain.labels}
    writer = writer_for(store, "distill", config, **parents)
    with pytest.raises(FloatingPointError, match="It is kept: reflux replay objects/distill/") as raised:
        stage.run(config, **parents, student=writer)
    assert re.search(message, str(raised.value))
    return str(raised.value).rpartition(" ")[2]


def test_a_student_with_an_infinite_weight(chain: Chain, tmp_path: Path) -> None:
    student = poisoned(chain.model, tmp_path / "student", f"{NORM}.weight", float("inf"))
    begins = rf"; it begins in {NORM} of the student, sequence 0, position 0\. It is kept"
    place = failed(chain, student, tmp_path / "store", message=begins, validation_traces=0)
    shown = CliRunner().invoke(cli, ["replay", place, "--store", str(tmp_path / "store")])
    assert shown.exit_code == 0, shown.output
    lines = dict(line.split(": ", 1) for line in shown.output.splitlines())
    assert lines["step 1"].startswith("distill: the loss of step 1 is nan nats a token")
    assert lines["made again"] == "nan nats a token, 4 sequences"
    assert lines["parameters that are not finite"] == f"student: {NORM}.weight"
    assert lines["first in the forward pass"].startswith(f"output of {NORM}, sequence 0, token 0 '")
    assert lines["sequences with such a loss"].count("sequence") == 3
    assert lines["sequences with such a loss"].endswith("and 1 more")

    found = json.loads(CliRunner().invoke(cli, ["replay", place, "--store", str(tmp_path / "store"), "--json"]).output)
    assert found["parameters"] == [f"student: {NORM}.weight"]
    assert len(found["losses"]) == 4


def test_what_is_wrong_before_training_is_kept_as_well(chain: Chain, tmp_path: Path) -> None:
    student = poisoned(chain.model, tmp_path / "student", "model.layers.0.input_layernorm.weight", float("nan"))
    failed(chain, student, tmp_path / "store")


@pytest.mark.parametrize(
    ("options", "what", "is_average"),
    [
        ({"export": "last"}, "the validation loss of the last weights is nan", False),
        ({"validate_every": 1}, "the validation loss after step 1 is nan", True),
        ({"generations_every": 1}, "answers after step 1: the model's logits are NaN for rows [0, 1, 2, 3]", False),
    ],
)
def test_what_the_last_step_broke_is_kept_with_the_weights_that_were_validated(
    chain: Chain, tmp_path: Path, options: dict[str, object], what: str, is_average: bool
) -> None:
    """A rate at which one step sends the weights beyond what float32 can square."""
    one_step = {"warmup_steps": 0, "joint_steps": 0, "finetune_steps": 1, "finetune_student_lr": 1e36}
    place = failed(chain, chain.model, tmp_path / "store", final_rate=1.0, weight_decay=0.0, **one_step, **options)
    shown = CliRunner().invoke(cli, ["replay", place, "--store", str(tmp_path / "store")])
    assert f"distill: {what}" in shown.output
    assert "made again: nan nats a token" in shown.output
    store = Store.open(str(tmp_path / "store"))
    (key,) = (key for key in store.list(place) if key.endswith("weights.safetensors"))
    store.download(key, tmp_path / "weights.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    moved = load_file(tmp_path / "weights.safetensors")[name] - load_file(chain.model / "model.safetensors")[name]
    share = 0.5 if is_average else 1.0  # ema_decay 0.5; AdamW's first step is the rate
    assert moved.abs().median() == pytest.approx(share * 1e36, rel=1e-3)


@pytest.mark.parametrize("options", [{}, {"lora_rank": 2}])
def test_the_step_is_made_again_with_its_start_and_its_share_of_the_teacher(
    chain: Chain, tmp_path: Path, options: dict[str, object]
) -> None:
    earlier = chain.distilled(objective="forward_kl", on_policy_fraction=0.0, finetune_student_lr=1e-2)
    options |= {"start_uri": str(chain.folder / "objects" / "distill" / earlier.key)}
    trainer = trainer_of(chain, warmup_steps=0, joint_steps=0, on_policy_fraction=0.0, **options)
    sequences = [*trainer.traces.values()][:3]
    scored = sum(sequence.scored for sequence in sequences)
    at_share = {w: trainer._accumulate(sequences, scored, w)[0] / scored for w in (0.25, 1.0)}
    assert abs(at_share[0.25] - at_share[1.0]) > 0.1
    writer = writer_for(
        tmp_path / "store", "distill", trainer.config, traces=chain.traces, profile=chain.profile, labels=chain.labels
    )
    (tmp_path / "kept").mkdir()
    place = keep(writer, trainer, NotFiniteError("it broke", sequences, 0.25), tmp_path / "kept")
    shown = CliRunner().invoke(cli, ["replay", place, "--store", str(tmp_path / "store"), "--json"])
    assert json.loads(shown.output)["loss_nats"] == pytest.approx(at_share[0.25], rel=1e-5)


def test_a_trace_that_is_in_a_step_twice_is_kept_twice(chain: Chain, tmp_path: Path) -> None:
    student = poisoned(chain.model, tmp_path / "student", f"{NORM}.weight", float("inf"))
    options = {"hard_weight": 8, "batch_sequences": 12, "validation_traces": 0}
    place = failed(chain, student, tmp_path / "store", **options)
    shown = CliRunner().invoke(cli, ["replay", place, "--store", str(tmp_path / "store")])
    assert "made again: nan nats a token, 12 sequences" in shown.output


@pytest.mark.parametrize("objective", ["forward_kl", "sampled_reverse_kl"])
def test_rollouts_that_are_not_finite_keep_their_prompts(chain: Chain, tmp_path: Path, objective: str) -> None:
    student = poisoned(chain.model, tmp_path / "student", f"{NORM}.weight", float("inf"))
    options = {"objective": objective, "trace_objective": "forward_kl", "score_prompts": False}
    place = failed(chain, student, tmp_path / "store", validation_traces=0, on_policy_fraction=1.0, **options)
    shown = CliRunner().invoke(cli, ["replay", place, "--store", str(tmp_path / "store")])
    assert "step 1: distill: rollouts for step 1: the model's logits are NaN for rows [0, 1, 2]" in shown.output
    assert f"first in the forward pass: output of {NORM}, sequence 0, token 0" in shown.output


def test_a_copy_is_whole_and_holds_no_code(chain: Chain, tmp_path: Path) -> None:
    student = poisoned(chain.model, tmp_path / "student", f"{NORM}.weight", float("inf"))
    place = failed(chain, student, tmp_path / "store", validation_traces=0)
    store = Store.open(str(tmp_path / "store"))
    names = {Path(key).name for key in store.list(place)}
    assert names == {
        "checkpoint.json",
        "replay.json",
        "sequences.safetensors",
        "weights.safetensors",
        "policy_table.bin",
    }
    copy = tmp_path / "copy"
    for key in store.list(place):
        store.download(key, copy / Path(key).name)
    kept = read(copy)
    assert kept.step == 1
    assert [s.scored for s in kept.sequences] == [s.teacher.logprobs_TB.shape[0] for s in kept.sequences]
    assert torch.isinf(kept.weights[f"{NORM}.weight"][3])
    shown = CliRunner().invoke(cli, ["replay", str(copy)])
    assert f"first in the forward pass: output of {NORM}" in shown.output

    shutil.copy(chain.model / "model.safetensors", student / "model.safetensors")
    changed = CliRunner().invoke(cli, ["replay", str(copy)])
    assert changed.exit_code == 2
    assert "the step was made with sha256:" in changed.output


def test_nothing_is_kept_there(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    shown = CliRunner().invoke(cli, ["replay", "objects/distill/0/failures", "--store", str(tmp_path / "store")])
    assert shown.exit_code == 2
    assert "no step is kept there" in shown.output
