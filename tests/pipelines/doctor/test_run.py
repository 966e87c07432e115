"""`reflux doctor RUN`: a sound run, a stopped one, and each trap that is known, made to happen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import tiny_chain
import torch
from click.testing import CliRunner
from stage_writers import writer_for
from tiny_chain import Chain
from tiny_model import save_tiny_model

from reflux.components import progress, sources
from reflux.components.algorithms.low_bit import site_modules
from reflux.components.algorithms.policies import PositionTable
from reflux.components.artifacts import Artifact
from reflux.components.bundles.bundle import load_bundle
from reflux.components.calibrate import stage as calibrate
from reflux.components.calibrate.config import CalibrateConfig
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.distill.config import DistillConfig
from reflux.components.profile_kv import stage as profile_kv
from reflux.components.profile_kv.config import ProfileKvConfig
from reflux.components.storage import Store
from reflux.pipelines import runs
from reflux.pipelines.__main__ import cli
from reflux.pipelines.doctor import data, hardware, policy, quantisation, run
from reflux.pipelines.doctor.determinism import determinism
from reflux.pipelines.doctor.evidence import Evidence, gather, student_of
from reflux.pipelines.doctor.finding import Finding
from reflux.pipelines.store import stores

NAMES = [
    "tokens", "sequences", "loss", "teacher", "observers", "rounding", "rope", "saturation", "movement", "warm-up",
    "driver", "gpu memory", "CUDA graphs", "determinism",
]  # fmt: skip
TRAINING = {"max_sequence_tokens": 96, "checkpoint_every": 1, "warmup_policy_lr": 1e-2, "finetune_policy_lr": 1e-2}


class StoppedError(Exception):
    """Somebody stopped the training."""


@pytest.fixture(scope="module")
def chain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return tiny_chain.make(tmp_path_factory.mktemp("chain"), tiny_model)


@pytest.fixture(scope="module")
def student(chain: Chain) -> Artifact:
    return chain.distilled(**TRAINING)


@pytest.fixture(scope="module")
def bundle(chain: Chain, student: Artifact) -> Artifact:
    config = CalibrateConfig(student_uri=str(chain.model), check_traces=2)
    parents = {"student": student, "profile": chain.profile, "traces": chain.traces}
    writer = writer_for(chain.folder, "calibrate", config, **parents)
    return writer.commit(calibrate.run(config, **parents, bundle=writer))


def record(folder: Path, chain: Chain, config: DistillConfig, made: dict[str, Artifact]) -> runs.RunRecord:
    """A run's folder over the chain's store."""
    ref = stores.StoreRef(kind="directory", uri=str(chain.folder))
    collecting = CollectTracesConfig(teacher=str(chain.model), prompts_uri=str(chain.folder / "prompts.jsonl"))
    configs = {"collect_traces": asdict(collecting), "distill": asdict(config)}
    made = {"collect_traces": chain.traces, "profile_kv": chain.profile, "ingest_labels": chain.labels} | made
    kept = {stage: {"key": artifact.key, "digest": artifact.digest} for stage, artifact in made.items()}
    result = runs.RunRecord(
        run=folder.name, recipe="demo", store=ref, configs=configs, config_digest="sha256:00", artifacts=kept
    )
    folder.mkdir(parents=True)
    runs.write(folder, result)
    return result


@pytest.fixture
def evidence(chain: Chain, student: Artifact, tmp_path: Path) -> Evidence:
    made = record(tmp_path / "run", chain, chain.training(**TRAINING), {"distill": student})
    return gather(made, Store.open(str(chain.folder)), tmp_path)


def found_in(folder: Path) -> dict[str, Finding]:
    findings = [*run.examine(folder)]
    assert [finding.check for finding in findings] == NAMES
    return {finding.check: finding for finding in findings}


def test_a_sound_run_has_nothing_wrong(chain: Chain, student: Artifact, bundle: Artifact, tmp_path: Path) -> None:
    folder = tmp_path / "reflux-data" / "runs" / "sound"
    record(folder, chain, chain.training(**TRAINING), {"distill": student, "calibrate": bundle})
    found = found_in(folder)
    assert {name for name in NAMES if found[name].status not in ("ok", "skip")} <= {"loss"}, found
    assert found["driver"].status == "skip" or torch.cuda.is_available()
    assert "8 steps" in found["loss"].found
    assert found["determinism"].found.startswith("4 times the same request")
    told = CliRunner().invoke(cli, ["doctor", "sound", "--data-dir", str(tmp_path / "reflux-data")])
    assert told.exit_code == 0, told.output
    assert [line[6:17].strip() for line in told.output.splitlines()] == NAMES


def test_a_stopped_run_is_looked_at_as_far_as_it_came(chain: Chain, tmp_path: Path) -> None:
    config = chain.training(**TRAINING, seed=7)

    def stop(points: Any) -> None:
        if points[-1].step == 4:
            raise StoppedError

    with progress.listening(stop), pytest.raises(StoppedError):
        chain.distilled(**TRAINING, seed=7)
    folder = tmp_path / "stopped"
    made = record(folder, chain, config, {})
    found = found_in(folder)
    assert found["loss"] == Finding(
        check="loss", status="skip", found="4 steps are known, too few to say whether it falls"
    )
    assert (found["rounding"].status, found["movement"].status, found["determinism"].status) == ("ok", "ok", "skip")
    assert found["determinism"].found == "calibrate is not done"
    left = gather(made, Store.open(str(chain.folder)), tmp_path)
    model, before = student_of(left), student_of(replace(left, weights={}, table=None))
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(model.get_parameter(name), left.weights[name])
    assert not torch.equal(model.get_parameter(name), before.get_parameter(name))


def test_a_run_before_its_training_says_that(chain: Chain, tmp_path: Path) -> None:
    record(tmp_path / "early", chain, chain.training(**TRAINING, seed=8), {})
    found = found_in(tmp_path / "early")
    assert found["movement"].status == found["sequences"].status == "skip"
    assert "no step of the training is known" in found["loss"].found
    assert (found["tokens"].status, found["rounding"].status) == ("ok", "ok")


def test_a_step_that_could_not_be_made_is_pointed_at(evidence: Evidence) -> None:
    found = data.loss(replace(evidence, failed_step="objects/distill/ab/failures"))
    assert (found.status, found.fix) == ("fail", "reflux replay objects/distill/ab/failures")


def test_other_token_ids_are_named(evidence: Evidence, chain: Chain, tmp_path: Path) -> None:
    other = Path(shutil.copytree(chain.model, tmp_path / "other"))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    swapped = {**evidence.given, "student_uri": sources.resolve("student_uri", str(other))}
    found = data.tokens(replace(evidence, given=swapped))
    assert found.status == "fail"
    assert "2 tokens have other ids" in found.found


def test_another_teacher_than_the_one_that_answered_is_named(evidence: Evidence, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", seed=1)
    found = data.tokens(replace(evidence, given={**evidence.given, "teacher": sources.resolve("teacher", str(other))}))
    assert found.status == "fail"
    assert "traces: teacher_digest is" in found.found


@pytest.mark.parametrize(
    ("metrics", "status"),
    [
        ({"truncation_rate": 0.1, "unscored_rate": 0.0}, "ok"),
        ({"truncation_rate": 0.5, "unscored_rate": 0.0}, "warn"),
        ({"truncation_rate": 0.0, "unscored_rate": 0.125}, "warn"),
    ],
)
def test_sequences_that_were_cut_are_counted(evidence: Evidence, metrics: dict[str, float], status: str) -> None:
    assert data.sequences(replace(evidence, history=[metrics] * 3)).status == status


@pytest.mark.parametrize(
    ("losses", "kept_back", "status", "fix"),
    [
        ([2.0, 1.0], (2.0, 1.0), "ok", ""),
        ([1.0, 2.0], (2.0, 1.0), "warn", "nothing is wrong"),
        ([2.0, 1.0], (1.0, 2.0), "warn", "does not carry over"),
        ([1.0, 2.0], (1.0, 2.0), "warn", "go through the checks below"),
    ],
)
def test_a_loss_that_does_not_fall_is_told_apart_by_what_was_kept_back(
    evidence: Evidence, student: Artifact, losses: list[float], kept_back: tuple[float, float], status: str, fix: str
) -> None:
    seen = dict(zip(("validation_loss_before_nats", "validation_loss_ema_nats"), kept_back, strict=True))
    told = Artifact(student.store, student.bytes, "the student")
    told.record = replace(told.record, metrics=seen)
    steps = [{"loss_nats": value} for value in losses for _ in range(6)]
    found = data.loss(replace(evidence, history=steps, made={**evidence.made, "distill": told}))
    assert found.status == status, found
    assert fix in found.fix


def test_a_teacher_of_two_types_or_of_few_bits_is_named(evidence: Evidence, chain: Chain, tmp_path: Path) -> None:
    assert data.teacher(evidence).found == "answered in float32, scores rollouts in float32"
    found = data.teacher(replace(evidence, config=replace(evidence.config, compute_dtype="bfloat16")))
    assert (found.status, found.found) == ("warn", "answered in float32, scores rollouts in bfloat16")
    other = Path(shutil.copytree(chain.model, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text()) | {"quantization_config": {"quant_method": "awq"}}
    (other / "config.json").write_text(json.dumps(config))
    given = {**evidence.given, "teacher": sources.resolve("teacher", str(other))}
    found = data.teacher(replace(evidence, given=given))
    assert (found.status, found.found.rpartition("; ")[2]) == ("warn", "its weights are quantised by awq")


def test_observers_that_saw_nothing_are_named(evidence: Evidence) -> None:
    profile, sites = evidence.artifact("profile_kv"), [*site_modules(student_of(evidence))]
    assert quantisation.observers(profile, sites, 64).status == "ok"
    silent = quantisation.observers(profile, [*sites, "layers.7.mlp_in"], 64)
    assert (silent.status, "1 of 9 sites have no statistics, the first is layers.7.mlp_in" in silent.found) == (
        "fail",
        True,
    )
    short = quantisation.observers(profile, sites, 2048)
    assert short.status == "warn"
    assert "scales there are copies" in short.found


def test_observers_of_a_table_with_more_rows(evidence: Evidence, chain: Chain, tmp_path: Path) -> None:
    config = ProfileKvConfig(student_uri=str(chain.model), cost_traces=0, knots_per_doubling=4)
    writer = writer_for(tmp_path, "profile_kv", config, traces=chain.traces)
    profile = writer.commit(profile_kv.run(config, traces=chain.traces, profile=writer))
    sites = [*site_modules(student_of(evidence))]
    assert quantisation.observers(profile, sites, 64).status == "ok"
    assert quantisation.observers(profile, sites, 2048).status == "warn"


def off_in_training(model: Any) -> None:
    def switch(m: Any, rounds: bool) -> None:
        if m.training:
            m.rounds_activations = rounds

    model.register_forward_pre_hook(lambda m, _: switch(m, False))
    model.register_forward_hook(lambda m, *_: switch(m, True))


def off_always(model: Any) -> None:
    model.rounds_activations = False


def dropout(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5


@pytest.mark.parametrize(
    ("trap", "message"),
    [
        (off_in_training, "fake quantisation is off in training mode"),
        (off_always, "nothing is rounded"),
        (dropout, "something hangs on the mode"),
    ],
)
def test_a_forward_that_does_not_round_as_it_should(
    evidence: Evidence, trap: Callable[[Any], None], message: str
) -> None:
    weights = {name: value for name, value in evidence.weights.items() if not name.endswith("log_clip_OG")}
    activations_alone = replace(
        evidence, config=replace(evidence.config, weight_bits=16, weight_clip_lr=0.0), weights=weights
    )
    model, token_ids = student_of(activations_alone), evidence.token_ids(32)
    assert quantisation.rounding(model, token_ids).status == "ok"
    trap(model)
    found = quantisation.rounding(model, token_ids)
    assert found.status == "fail"
    assert message in found.found


@pytest.mark.parametrize(("bits", "status"), [(4, "fail"), (6, "fail"), (8, "ok")])
def test_rope_in_few_bits(evidence: Evidence, bits: int, status: str) -> None:
    model = student_of(evidence)
    assert quantisation.rope(model).found == "sine and cosine are those of float32"
    top = 2 ** (bits - 1) - 1
    model.model.rotary_emb.register_forward_hook(lambda *call: tuple((t * top).round() / top for t in call[2]))
    found = quantisation.rope(model)
    assert found.status == status, found
    assert f"those of {bits}.0 bits" in found.found


def test_rope_whose_frequencies_were_rounded_to_bfloat16(evidence: Evidence) -> None:
    model = student_of(evidence)
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.bfloat16().float()
    assert quantisation.rope(model).status == "fail"


def with_scale(table: PositionTable, scale: float) -> PositionTable:
    """The table with another main scale at one site and position."""
    scales_SP2 = table.scales()
    scales_SP2[3, 2, 0] = scale
    return PositionTable(table.sites, scales_SP2, table.knots)


@pytest.mark.parametrize(
    ("scale", "status"), [(0.02, "ok"), (5e-3, "warn"), (20.0, "warn"), (5e-7, "fail"), (float("nan"), "fail")]
)
def test_a_policy_that_saturates(evidence: Evidence, scale: float, status: str) -> None:
    assert evidence.profiled is not None
    before = with_scale(evidence.profiled, 0.02)
    found = policy.saturation(with_scale(before, scale), before)
    assert found.status == status, found
    assert status == "ok" or f"{before.sites[3]} at position {before.knots[2]} is {scale:.3g}" in found.found


def test_scales_that_were_large_before_training_are_no_saturation(evidence: Evidence) -> None:
    assert evidence.profiled is not None
    large = with_scale(evidence.profiled, 20.0)
    found = policy.saturation(large, large)
    assert found.status == "ok"
    assert "beyond 0.01 to 10, as they were before training" in found.found


def test_a_policy_whose_gradient_is_near_zero(evidence: Evidence) -> None:
    assert policy.movement(evidence).status == "ok"
    stands = policy.movement(replace(evidence, table=evidence.profiled))
    assert (stands.status, "its gradient is near zero" in stands.fix) == ("warn", True)
    faint = [step | {"policy_gradient_norm": 1e-12} for step in evidence.history]
    assert policy.movement(replace(evidence, history=faint)).found.startswith("its gradient had norm 1e-12")
    unasked = policy.movement(replace(evidence, history=[step | {"policy_lr": 0.0} for step in evidence.history]))
    assert (unasked.status, unasked.found) == ("warn", "its rate was 0 in every step, the table stands")


def test_a_warm_up_that_is_left_out(evidence: Evidence) -> None:
    assert policy.warmup(evidence).status == "ok"
    assert policy.warmup(replace(evidence, config=replace(evidence.config, warmup_steps=0))).status == "warn"


@pytest.mark.parametrize(
    ("version", "built_for", "capability", "status"),
    [
        (13000, "13.0", (9, 0), "ok"),
        (12040, "12.8", (8, 0), "ok"),
        (11080, "12.8", (9, 0), "fail"),
        (13000, "13.0", (7, 5), "fail"),
    ],
)
def test_a_driver_or_gpu_that_is_too_old(
    version: int, built_for: str, capability: tuple[int, int], status: str
) -> None:
    assert hardware.driver(version, built_for, capability).status == status


@pytest.mark.parametrize(("allocated", "retries", "status"), [(9, 0, "ok"), (6, 0, "warn"), (9, 3, "warn")])
def test_fragmented_memory(allocated: int, retries: int, status: str) -> None:
    taken = {"bytes_allocated": allocated << 30, "bytes_reserved": 10 << 30, "retries": retries}
    assert hardware.memory(taken).status == status


def test_graphs_that_the_environment_asks_for() -> None:
    assert hardware.graphs({}).status == "ok"
    assert hardware.graphs({hardware.GRAPHS: "1"}).status == "warn"


def test_a_bundle_that_answers_differently(bundle: Artifact, tmp_path: Path) -> None:
    bundle.download_all("", tmp_path / "bundle")
    model, asked = load_bundle(tmp_path / "bundle"), [5, 40, 9, 77, 30]
    assert determinism(model, asked).status == "ok"
    dropout(model.train())
    found = determinism(model, asked)
    assert found.status == "fail"
    assert found.found.startswith("request 2 of 4 has ")
