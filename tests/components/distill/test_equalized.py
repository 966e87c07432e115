"""A student of equalised channels: begun with the profile's scales, evaluated as it was begun, kept whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_chain
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from stage_writers import writer_for
from step_in_processes import trainer_of
from tiny_bundle import write_tiny_bundle
from tiny_chain import Chain

from reflux.components import models, sources
from reflux.components.algorithms.equalization import ChannelPower
from reflux.components.algorithms.low_bit import Scheme, apply_scheme, watching_sites
from reflux.components.artifacts import Artifact
from reflux.components.bundles import policy_table
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.distill.replay import keep
from reflux.components.distill.student import scheme_of
from reflux.components.distill.trainer import NotFiniteError
from reflux.components.equalized import equalized
from reflux.components.evaluate.candidates import candidates
from reflux.components.profile_kv.config import ProfileKvConfig
from reflux.components.sequences import padded
from reflux.pipelines.__main__ import cli
from reflux.pipelines.doctor.evidence import Evidence, student_of

ONLY_POLICY = {"warmup_steps": 1, "joint_steps": 0, "finetune_steps": 0, "on_policy_fraction": 0.0}
PROBE = torch.arange(3, 40)[None]


@pytest.fixture(scope="module")
def chain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return tiny_chain.make(tmp_path_factory.mktemp("chain"), tiny_model, equalization_power=0.5)


@pytest.fixture(scope="module")
def student(chain: Chain) -> Artifact:
    """Whose weights never moved."""
    return chain.distilled(**ONLY_POLICY)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(PROBE, position_ids=torch.arange(PROBE.shape[1])[None]).logits


def test_the_profile_holds_what_was_seen_before_and_a_table_of_what_is_seen_after(chain: Chain) -> None:
    model, power = models.load_model(chain.model), ChannelPower()
    rows = [row for row in chain.traces.table("traces").to_pylist() if row["split"] == "train"]
    read = [padded([row["prompt_token_ids"] + row["response_token_ids"]], 0) for row in rows]
    with torch.no_grad(), watching_sites(model, power.see):
        for input_BT, mask_BT, position_BT in read:
            power.begin(mask_BT)
            model.model(input_BT, attention_mask=mask_BT, position_ids=position_BT)
    seen = {row["site"]: row for row in chain.profile.table("equalization").to_pylist()}
    for site, rms_C in power.rms().items():
        torch.testing.assert_close(torch.tensor(seen[site]["rms"]), rms_C.float(), rtol=1e-4, atol=1e-6)
    absmax: dict[str, float] = {}

    def largest(site: str, x_BTC: torch.Tensor) -> None:
        absmax[site] = max(absmax.get(site, 0.0), float(x_BTC.abs().max()))

    with torch.no_grad(), watching_sites(equalized(model, chain.profile), largest):
        for input_BT, mask_BT, position_BT in read:
            model.model(input_BT, attention_mask=mask_BT, position_ids=position_BT)
    told: dict[str, float] = {}
    for row in chain.profile.table("activations").to_pylist():
        told[row["site"]] = max(told.get(row["site"], 0.0), row["absmax"])
    assert told == pytest.approx(absmax, rel=1e-4)


def test_a_profile_without_it_has_no_such_table_and_changes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    plain = tiny_chain.make(tmp_path, tiny_model)
    assert not plain.profile.shards("equalization")
    model = models.load_model(tiny_model)
    assert torch.equal(logits(equalized(model, plain.profile)), logits(models.load_model(tiny_model)))
    assert not hasattr(model, "is_equalized")


def test_a_training_begins_with_the_rescaled_weights(chain: Chain, student: Artifact, tmp_path: Path) -> None:
    student.download("latent.safetensors", tmp_path / "latent.safetensors")
    begun = dict(equalized(models.load_model(chain.model), chain.profile).named_parameters())
    kept = {n: v for n, v in load_file(tmp_path / "latent.safetensors").items() if not n.endswith("log_clip_OG")}
    assert kept
    assert all(torch.equal(value, begun[name]) for name, value in kept.items())
    base = dict(models.load_model(chain.model).named_parameters())
    assert not all(torch.equal(value, base[name]) for name, value in kept.items())


def test_it_is_evaluated_beside_what_it_began_with(chain: Chain, tmp_path: Path) -> None:
    scheme, policy = Scheme(group_size=32), policy_table.decode(chain.profile.file("policy_table.bin"))

    def begun() -> Any:
        return equalized(models.load_model(chain.model), chain.profile)

    compared = candidates(teacher=None, student=chain.model, bundle=tmp_path, scheme=scheme, policy=policy, begun=begun)
    found = {candidate.role: candidate for candidate in compared}
    expected = logits(apply_scheme(begun(), scheme, policy))
    assert torch.equal(logits(found["undistilled"].load()), expected)
    unscaled = logits(apply_scheme(models.load_model(chain.model), scheme.weights_only()))
    assert torch.equal(logits(found["weights_only"].load()), unscaled)


def test_a_step_that_is_kept_under_adapters_has_the_weights_they_stand_on(chain: Chain, tmp_path: Path) -> None:
    trainer = trainer_of(chain, warmup_steps=0, joint_steps=0, on_policy_fraction=0.0, lora_rank=2)
    sequences = [*trainer.traces.values()][:3]
    scored = sum(sequence.scored for sequence in sequences)
    loss_nats = trainer._accumulate(sequences, scored, 1.0)[0] / scored
    parents = {"traces": chain.traces, "profile": chain.profile, "labels": chain.labels}
    writer = writer_for(tmp_path / "store", "distill", trainer.config, **parents)
    (tmp_path / "kept").mkdir()
    place = keep(writer, trainer, NotFiniteError("it broke", sequences, 1.0), tmp_path / "kept")
    shown = CliRunner().invoke(cli, ["replay", place, "--store", str(tmp_path / "store"), "--json"])
    assert json.loads(shown.output)["loss_nats"] == pytest.approx(loss_nats, rel=1e-5)


def test_codes_of_weights_that_were_not_rescaled_are_no_start(chain: Chain, tmp_path: Path) -> None:
    folder = tmp_path / "codes"
    write_tiny_bundle(folder, chain.model, activation_bits=16)
    (folder / "quant_config.json").unlink()
    with pytest.raises(ValueError, match=rf"start_uri {folder}: .*; take profile_kv.equalization_power=0"):
        chain.distilled(start_uri=str(folder), weight_zero_points=True, activation="plain")


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_a_power_outside_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"profile_kv.equalization_power .*: must be in \[0, 1\]"):
        ProfileKvConfig(student_uri="x", equalization_power=value)


def test_the_doctor_sees_the_rescaled_student(chain: Chain) -> None:
    config = chain.training(activation="plain")
    evidence = Evidence(
        made={"profile_kv": chain.profile},
        collecting=CollectTracesConfig(teacher=str(chain.model), prompts_uri="unused"),
        config=config,
        given={"student_uri": sources.resolve("student_uri", str(chain.model))},
    )
    base = equalized(models.load_model(chain.model), chain.profile)
    assert torch.equal(logits(student_of(evidence)), logits(apply_scheme(base, scheme_of(config))))
