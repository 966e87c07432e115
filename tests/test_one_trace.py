"""One trace through all six stages, in process, on a tiny model: the pipeline's story, runnable.

The trace that is followed is one the student is taught. Held-out traces are what the verdict is made of, so from
`evaluate` on the story goes on with one of those, whose trace_id was kept out of every stage that learns.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stage_writers import writer_for

from reflux.components import models
from reflux.components.algorithms.low_bit import apply_scheme
from reflux.components.artifacts import Artifact
from reflux.components.bundles import policy_table
from reflux.components.bundles.bundle import load_bundle, read_scheme
from reflux.components.calibrate import stage as calibrate
from reflux.components.calibrate.config import CalibrateConfig
from reflux.components.collect_traces import stage as collect_traces
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.distill import stage as distill
from reflux.components.distill.config import DistillConfig
from reflux.components.distill.examples import training_examples
from reflux.components.evaluate import stage as evaluate
from reflux.components.evaluate.config import EvaluateConfig
from reflux.components.ingest_labels import stage as ingest_labels
from reflux.components.ingest_labels.config import IngestLabelsConfig
from reflux.components.profile_kv import stage as profile_kv
from reflux.components.profile_kv.config import ProfileKvConfig

PROMPTS = [
    {"prompt_id": f"p{i}", "dimension": "trivial", "prompt": f"What is {i} and {i}?"} for i in range(10)
]  # p0 and p7 are held out
TAUGHT, UNSEEN = "p3", "p7"
LABELS = [
    {"prompt_id": TAUGHT, "step": 0, "annotator": "ann", "rating": 1, "comment": "a wrong sum"},
    {"prompt_id": UNSEEN, "step": 0, "annotator": "ann", "rating": 5},
]


@dataclass(frozen=True, kw_only=True)
class Run:
    base: Path
    traces: Artifact
    profile: Artifact
    labels: Artifact
    student: Artifact
    bundle: Artifact
    scores: Artifact


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The six calls of pipelines/distillation.py; every later test reads what they left."""
    folder = tmp_path_factory.mktemp("one-trace")
    model = str(tiny_model)

    collect = CollectTracesConfig(
        teacher=model, prompts_uri=_jsonl(folder / "prompts.jsonl", PROMPTS), max_new_tokens=24
    )
    writer = writer_for(folder, "collect_traces", collect)
    traces = writer.commit(collect_traces.run(collect, traces=writer))

    profiling = ProfileKvConfig(student_uri=model, cost_traces=8, cost_tokens=4)
    writer = writer_for(folder, "profile_kv", profiling, traces=traces)
    profile = writer.commit(profile_kv.run(profiling, traces=traces, profile=writer))

    ingest = IngestLabelsConfig(labels_uri=_jsonl(folder / "labels.jsonl", LABELS))
    writer = writer_for(folder, "ingest_labels", ingest, traces=traces)
    labels = writer.commit(ingest_labels.run(ingest, traces=traces, labels=writer))

    training = DistillConfig(
        teacher=model, student_uri=model, warmup_steps=2, joint_steps=2, finetune_steps=8, finetune_student_lr=1e-3,
        joint_last_layers=1, ema_decay=0.5, validation_traces=2, batch_sequences=4, rollout_batch=4,
        rollout_new_tokens=16,
    )  # fmt: skip
    writer = writer_for(folder, "distill", training, traces=traces, profile=profile, labels=labels)
    student = writer.commit(distill.run(training, traces=traces, profile=profile, labels=labels, student=writer))

    export = CalibrateConfig(student_uri=model)
    writer = writer_for(folder, "calibrate", export, student=student, profile=profile, traces=traces)
    bundle = writer.commit(calibrate.run(export, student=student, profile=profile, traces=traces, bundle=writer))

    judging = EvaluateConfig(
        teacher=model, student_uri=model, windows=2, window_tokens=64, latency_tokens=20, generations=2,
        generation_tokens=8, min_gap_closed_text=0.0,
    )  # fmt: skip
    parents = {"bundle": bundle, "student": student, "profile": profile, "traces": traces}
    writer = writer_for(folder, "evaluate", judging, **parents)
    scores = writer.commit(evaluate.run(judging, **parents, scores=writer))

    return Run(
        base=tiny_model, traces=traces, profile=profile, labels=labels, student=student, bundle=bundle, scores=scores
    )


def test_the_teacher_answers_and_what_it_would_have_said_is_kept(run: Run) -> None:
    trace = _trace(run, TAUGHT)
    assert trace["split"] == "train"
    assert trace["prompt"] == "What is 3 and 3?"
    answer = trace["response_token_ids"]
    for per_token in ("topk_token_ids", "topk_logprobs", "tail_logmass", "entropy_nats", "key_token_score"):
        assert len(trace[per_token]) == len(answer) > 0


def test_the_profile_has_timed_its_cache_and_seen_its_positions(run: Run) -> None:
    trace = _trace(run, TAUGHT)
    begin = len(trace["prompt_token_ids"])
    costs = _rows(run.profile, "kv_cost", trace_id=trace["trace_id"])
    assert [row["position"] for row in costs] == list(range(begin, begin + min(4, len(trace["response_token_ids"]))))
    at_its_first_answer = _rows(run.profile, "k_norms", layer=0, position=begin)
    assert at_its_first_answer[0]["sequences"] >= 1


def test_the_expert_finds_it_hard(run: Run) -> None:
    trace_id = _trace(run, TAUGHT)["trace_id"]
    (label,) = _rows(run.labels, "labels", trace_id=trace_id)
    assert (label["prompt_id"], label["rating"], label["comment"]) == (TAUGHT, 1, "a wrong sum")
    (sample,) = _rows(run.labels, "hard_samples", trace_id=trace_id)
    assert (sample["hard"], sample["reasons"]) == (True, ["low_rating"])


def test_the_student_is_taught_it_with_the_stored_distributions(run: Run) -> None:
    trace = _trace(run, TAUGHT)
    example = training_examples(run.traces, 256)[trace["trace_id"]]
    assert example.token_ids == trace["prompt_token_ids"] + trace["response_token_ids"]
    assert example.scored == len(trace["response_token_ids"])
    assert example.teacher is not None
    assert example.teacher.token_ids_TK.tolist() == trace["topk_token_ids"]
    history = run.student.table("training").to_pylist()
    assert {row["phase"] for row in history} == {"warmup", "joint", "finetune"}
    assert run.student.metrics["validation_loss_ema_nats"] < run.student.metrics["validation_loss_before_nats"]


def test_the_exported_bundle_answers_as_the_student_that_was_trained(run: Run, tmp_path: Path) -> None:
    trained = _trained(run, tmp_path / "latent.safetensors")
    run.bundle.download_all("", tmp_path / "bundle")
    exported = load_bundle(tmp_path / "bundle")
    trace = _trace(run, TAUGHT)
    input_BT = torch.tensor([trace["prompt_token_ids"] + trace["response_token_ids"]])
    position_BT = torch.arange(input_BT.shape[1])[None]
    with torch.no_grad():
        ours, theirs = (model(input_BT, position_ids=position_BT).logits for model in (trained, exported))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_the_verdict_is_over_traces_that_no_stage_has_learned_from(run: Run) -> None:
    taught, unseen = _trace(run, TAUGHT), _trace(run, UNSEEN)
    assert unseen["split"] == "heldout"
    assert unseen["trace_id"] not in training_examples(run.traces, 256)
    assert _rows(run.profile, "kv_cost", trace_id=unseen["trace_id"]) == []
    assert _rows(run.scores, "trace_scores", trace_id=taught["trace_id"]) == []
    scored = _rows(run.scores, "trace_scores", trace_id=unseen["trace_id"])
    schemes = ["fp32", "w4a16_rtn", "w4a4_plain", "w4a4_dual", "w4a4_distilled"]
    assert [row["scheme"] for row in scored] == schemes
    assert {row["tokens"] for row in scored} == {len(unseen["response_token_ids"])}

    summary = json.loads(run.scores.file("metrics.json"))
    assert [row["scheme"] for row in summary["table"]] == schemes
    assert summary["verdict"] in ("pass", "fail")
    assert run.scores.metrics["verdict.pass"] == (summary["verdict"] == "pass")
    assert {row["prompt_id"] for row in _rows(run.scores, "generations")} == {"p0", UNSEEN}
    assert b"w4a4_distilled" in run.scores.file("report.html")


def test_training_is_all_that_the_last_two_rows_differ_by(run: Run, tmp_path: Path) -> None:
    digests = {row["scheme"]: row["quantizer_digest"] for row in _rows(run.scores, "scores")}
    run.bundle.download("quant_config.json", tmp_path / "quant_config.json")
    assert digests["w4a4_dual"] == digests["w4a4_distilled"] == read_scheme(tmp_path).digest()
    assert len(set(digests.values())) == 4


def test_every_artifact_names_what_it_was_made_from(run: Run) -> None:
    traces, profile, labels = run.traces.digest, run.profile.digest, run.labels.digest
    student, bundle = run.student.digest, run.bundle.digest
    assert run.traces.parents == {}
    assert run.profile.parents == run.labels.parents == {"traces": traces}
    assert run.student.parents == {"traces": traces, "profile": profile, "labels": labels}
    assert run.bundle.parents == {"student": student, "profile": profile, "traces": traces}
    assert run.scores.parents == {"bundle": bundle, "student": student, "profile": profile, "traces": traces}


def _trace(run: Run, prompt_id: str) -> dict[str, Any]:
    (trace,) = _rows(run.traces, "traces", prompt_id=prompt_id)
    return trace


def _rows(artifact: Artifact, table: str, **where: Any) -> list[dict[str, Any]]:
    return [row for row in artifact.table(table).to_pylist() if where.items() <= row.items()]


def _trained(run: Run, file: Path) -> Any:
    """The forward that distill trained, put together again from its artifact."""
    run.student.download("latent.safetensors", file)
    policy = policy_table.decode(run.student.file("policy_table.bin"))
    model = apply_scheme(models.load_model(run.base), distill.scheme_of(DistillConfig()), policy)
    assert model.load_state_dict(load_file(file), strict=False).unexpected_keys == []
    return model


def _jsonl(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)
