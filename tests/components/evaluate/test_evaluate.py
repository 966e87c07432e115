"""The stage as a run calls it: real traces, profile, training and bundle of the tiny model go in, scores come out."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest
from stage_writers import writer_for
from tiny_model import save_tiny_model

from reflux.components.algorithms.low_bit import Scheme
from reflux.components.artifacts import Artifact
from reflux.components.bundles.policy_table import decode
from reflux.components.calibrate.config import CalibrateConfig
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.distill.config import DistillConfig
from reflux.components.evaluate import stage
from reflux.components.evaluate.candidates import candidates
from reflux.components.evaluate.config import EvaluateConfig
from reflux.components.ingest_labels.config import IngestLabelsConfig
from reflux.components.profile_kv.config import ProfileKvConfig
from reflux.components.schemas import GENERATIONS, LATENCIES, LAYER_ERRORS, SCORES, TRACE_SCORES

SCHEMES = ["fp32", "w4a16_rtn", "w4a4_plain", "w4a4_dual", "w4a4_distilled"]
SMALL = {"windows": 3, "window_tokens": 64, "generations": 2, "generation_tokens": 5, "latency_tokens": 20}


@dataclass(frozen=True)
class Run:
    """The artifacts that evaluate reads, in one store, and the model they were made with."""

    store: Path
    model: Path
    parents: dict[str, Artifact]

    def config(self, **changes: Any) -> EvaluateConfig:
        return EvaluateConfig(**{"teacher": str(self.model), "student_uri": str(self.model), **SMALL, **changes})

    def evaluate(self, config: EvaluateConfig) -> Artifact:
        scores = writer_for(self.store, "evaluate", config, **self.parents)
        return scores.commit(stage.run(config, **self.parents, scores=scores))


@pytest.fixture(scope="module")
def made(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("evaluate")
    prompts = folder / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"<script>alert({i})</script> {'why ' * (i % 5)}"}) + "\n" for i in range(16))
    )
    model = str(tiny_model)

    def stage_of(name: str, output: str, config: Any, **parents: Artifact) -> Artifact:
        writer = writer_for(folder / "store", name, config, **parents)
        module = importlib.import_module(f"reflux.components.{name}.stage")
        return writer.commit(module.run(config, **parents, **{output: writer}))

    traces = stage_of(
        "collect_traces",
        "traces",
        CollectTracesConfig(teacher=model, prompts_uri=str(prompts), heldout_fraction=0.4, max_new_tokens=12, top_k=8),
    )
    profile = stage_of(
        "profile_kv",
        "profile",
        ProfileKvConfig(student_uri=model, profiled_traces=4, cost_traces=1, cost_tokens=4),
        traces=traces,
    )
    labels = stage_of("ingest_labels", "labels", IngestLabelsConfig(), traces=traces)
    student = stage_of(
        "distill",
        "student",
        DistillConfig(
            teacher=model,
            student_uri=model,
            group_size=16,
            warmup_steps=1,
            joint_steps=1,
            finetune_steps=2,
            batch_sequences=2,
            micro_batch_sequences=2,
            validation_traces=2,
            rollout_batch=2,
            rollout_new_tokens=8,
        ),
        traces=traces,
        profile=profile,
        labels=labels,
    )
    bundle = stage_of(
        "calibrate",
        "bundle",
        CalibrateConfig(student_uri=model, check_traces=2),
        student=student,
        profile=profile,
        traces=traces,
    )
    parents = {"bundle": bundle, "student": student, "profile": profile, "traces": traces}
    return Run(folder / "store", tiny_model, parents)


@pytest.fixture(scope="module")
def scores(made: Run) -> Artifact:
    return made.evaluate(made.config())


def test_the_bundle_can_have_a_row_on_low_bit_kernels(made: Run):
    scores = made.evaluate(made.config(low_bit_kernels=True))
    rows = {row["scheme"]: row for row in json.loads(scores.file("metrics.json"))["table"]}
    assert list(rows) == [*SCHEMES, "w4a4_deployed"]
    deployed, imitated = rows["w4a4_deployed"], rows["w4a4_distilled"]
    assert (deployed["latency_of"], imitated["latency_of"]) == ("deployed", "simulated")
    assert deployed["perplexity"] == pytest.approx(imitated["perplexity"], rel=0.1)  # bfloat16, few tokens
    assert "w4a4_deployed" in scores.file("report.html").decode()


def test_the_rotated_base_can_have_a_row(made: Run):
    scores = made.evaluate(made.config(rotated_baseline=True))
    rows = {row["scheme"]: row for row in json.loads(scores.file("metrics.json"))["table"]}
    assert list(rows) == [*SCHEMES[:3], "w4a4_hadamard", *SCHEMES[3:]]
    rotated, plain = rows["w4a4_hadamard"], rows["w4a4_plain"]
    assert rotated["memory_bytes"] - plain["memory_bytes"] == 4 * 264 * 64  # the head, which is no longer the embedding
    assert rotated["kv_cache_bytes"] == 4 * 64 * 2 * 2 * 2 * 16
    errors = scores.table("layer_errors").to_pylist()
    of_rotated = [row["relative_error"] for row in errors if row["scheme"] == "w4a4_hadamard"]
    assert all(error < 0.7 for error in of_rotated)  # in another basis they would be about 1.4


def test_every_scheme_is_scored_on_the_same_heldout_traces(made: Run, scores: Artifact):
    table = scores.table("scores")
    assert table.schema.equals(SCORES)
    assert table["scheme"].to_pylist() == SCHEMES
    rows = {row["scheme"]: row for row in table.to_pylist()}
    assert rows["fp32"]["pmr"] == 1.0  # here the teacher is the student's base
    assert all(0 < row["pmr"] < 1 for name, row in rows.items() if name != "fp32")
    assert rows["w4a4_dual"]["memory_bytes"] == rows["w4a4_distilled"]["memory_bytes"]
    assert rows["w4a16_rtn"]["memory_bytes"] < rows["fp32"]["memory_bytes"]

    held = made.parents["traces"].table("traces", ["trace_id", "split", "response_token_ids"])
    held = held.filter(pc.equal(held["split"], "heldout"))
    by_trace = scores.table("trace_scores")
    assert by_trace.schema.equals(TRACE_SCORES)
    for scheme in SCHEMES:
        own = by_trace.filter(pc.equal(by_trace["scheme"], scheme))
        assert sorted(own["trace_id"].to_pylist()) == sorted(held["trace_id"].to_pylist())
        tokens = sum(map(len, held["response_token_ids"].to_pylist()))
        assert pc.sum(own["tokens"]).as_py() == tokens
        assert pc.sum(own["nll_nats"]).as_py() / tokens == pytest.approx(rows[scheme]["nll_heldout"])


def test_distilled_and_undistilled_have_one_quantiser(made: Run, scores: Artifact):
    digests = dict(
        zip(*(scores.table("scores")[name].to_pylist() for name in ("scheme", "quantizer_digest")), strict=True)
    )
    assert digests["w4a4_distilled"] == digests["w4a4_dual"] == Scheme(group_size=16).digest()
    assert len(set(digests.values())) == 4
    trained_with = Scheme(**json.loads(made.parents["student"].file("scheme.json")))
    assert digests["w4a4_distilled"] == trained_with.digest()


def test_tables_and_files_are_written_times_apart_from_content(scores: Artifact):
    assert scores.table("layer_errors").schema.equals(LAYER_ERRORS)
    assert scores.table("layer_errors").num_rows == 2 * len(SCHEMES)
    assert scores.table("generations").schema.equals(GENERATIONS)
    assert scores.table("generations").num_rows == 2 * len(SCHEMES)
    latencies = scores.table("latencies")
    assert latencies.schema.equals(LATENCIES)
    assert latencies["latency_of"].to_pylist() == ["deployed", *["simulated"] * 4]
    measured = {shard.name for shard in scores.shards() if shard.measured}
    assert measured == {"latencies", "report.html"}


def test_metrics_json_and_report_tell_the_same(made: Run, scores: Artifact):
    summary = json.loads(scores.file("metrics.json"))
    page = scores.file("report.html").decode()
    assert [row["scheme"] for row in summary["table"]] == SCHEMES
    assert summary["verdict"] in ("pass", "fail")
    assert scores.metrics["verdict.pass"] == (summary["verdict"] == "pass")
    for digest in (artifact.digest for artifact in made.parents.values()):
        assert digest in summary["parents"].values()
        assert digest in page
    assert "&lt;script&gt;alert(" in page
    assert "<script" not in page
    assert "finetune" in page


def test_doing_it_again_gives_the_same_digest(made: Run, scores: Artifact, tmp_path: Path):
    config = made.config()
    again = writer_for(tmp_path, "evaluate", config, **made.parents)
    assert again.commit(stage.run(config, **made.parents, scores=again)).digest == scores.digest


def test_a_failed_gate_is_a_result_and_a_text_of_ones_own_is_used(made: Run, tmp_path: Path):
    text = tmp_path / "own.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20, encoding="utf-8")
    strict = made.config(min_pmr=1.0, eval_text_uri=str(text), heldout_traces=2)
    summary = json.loads(made.evaluate(strict).file("metrics.json"))
    assert summary["verdict"] == "fail"
    assert summary["text"]["name"] == "own.txt"
    assert summary["heldout"]["traces"] == 2


def test_a_teacher_that_is_another_model_has_a_row_of_its_own(made: Run, tmp_path: Path):
    teacher = save_tiny_model(tmp_path / "teacher", layers=3, seed=1)
    artifact = made.evaluate(made.config(teacher=str(teacher)))
    rows = {row["scheme"]: row for row in artifact.table("scores").to_pylist()}
    assert list(rows) == ["teacher", *SCHEMES]
    assert rows["teacher"]["pmr"] == 1.0
    assert rows["fp32"]["pmr"] < 1.0
    assert "teacher" not in artifact.table("layer_errors")["scheme"].to_pylist()  # its layers are not the student's


def test_a_baseline_that_the_bundle_already_is_is_left_out(made: Run, tmp_path: Path):
    policy = decode(made.parents["profile"].file("policy_table.bin"))

    def names(scheme: Scheme) -> list[str]:
        found = candidates(
            teacher=None, student=made.model, bundle=tmp_path, scheme=scheme, policy=policy,
            begun=lambda: pytest.fail("only names are asked for"),
        )  # fmt: skip
        return [candidate.name for candidate in found]

    dual = Scheme(group_size=16)
    assert names(replace(dual, activation="plain")) == ["fp32", "w4a16_rtn", "w4a4_plain", "w4a4_distilled"]
    assert names(replace(dual, activation_bits=16)) == ["fp32", "w4a16_rtn", "w4a16_distilled"]
    assert names(replace(dual, weight_bits=3, activation_bits=8))[3:] == ["w3a8_dual", "w3a8_distilled"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_tokens": 600}, "evaluate.window_tokens 600: the student's context is 512"),
        ({"latency_tokens": 500}, "evaluate.latency_tokens: 511 tokens after the prompt"),
        ({"generation_tokens": 510}, "evaluate.generation_tokens: 510 tokens after the prompt"),
    ],
)
def test_sizes_beyond_the_context_are_refused_before_any_model_is_loaded(made: Run, changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        made.evaluate(made.config(**changes))
