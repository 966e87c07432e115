"""Both trace stores from the teacher to the student's loss: what is stored, what it serves, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_chain
import torch
from stage_writers import writer_for

from reflux.components import captured_schemas, schemas, tables
from reflux.components.algorithms.losses import forward_kl, log_probabilities, sampled_forward_kl
from reflux.components.algorithms.sparse_teacher import SparseTeacher
from reflux.components.artifacts import Artifact
from reflux.components.collect_traces import stage as collect_traces
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.collect_traces.distribution_columns import topk_columns
from reflux.components.distill.config import DistillConfig
from reflux.components.distill.examples import require_usable, training_examples
from reflux.components.distill.stored import StoredDraws
from reflux.components.models import kv_shape, load_model, load_tokenizer

PROMPTS = [{"prompt_id": f"p{i}", "prompt": f"What is {i} and {'more ' * i}?"} for i in range(9)]  # 0 and 7 held out


@pytest.fixture
def collect(tiny_model: Path, tmp_path: Path) -> Callable[..., Artifact]:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))

    def collect(store: str = "store", **options: Any) -> Artifact:
        config = CollectTracesConfig(
            teacher=str(tiny_model), prompts_uri=str(file), **{"max_new_tokens": 10, "batch_size": 4} | options
        )
        writer = writer_for(tmp_path / store, "collect_traces", config)
        return writer.commit(collect_traces.run(config, traces=writer))

    return collect


def test_draws_are_those_of_the_teacher_and_leave_its_answers_alone(
    collect: Callable[..., Artifact], tiny_model: Path
) -> None:
    draws = 3000
    traces, cut = collect(trace_store="sampled", top_k=draws), collect(store="other")
    assert traces.table("traces")["response_token_ids"] == cut.table("traces")["response_token_ids"]
    assert traces.table("traces").schema.equals(schemas.traces_sampled(draws, 259))
    model, tokenizer = load_model(tiny_model), load_tokenizer(tiny_model)
    for row in traces.table("traces").to_pylist():
        prompt, answer = row["prompt_token_ids"], row["response_token_ids"]
        logits_TP = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        exact_TV = log_probabilities(logits_TP, len(tokenizer)).exp()
        for ids, counts, exact_V in zip(row["sampled_token_ids"], row["sampled_counts"], exact_TV, strict=True):
            assert sum(counts) == draws
            shares_V = torch.zeros(len(tokenizer)).scatter(0, torch.tensor(ids), torch.tensor(counts) / draws)
            assert ((shares_V - exact_V).abs() <= 2 / draws + 1e-6).all()  # one draw from each slice of the mass
    assert traces.metrics["distinct_tokens_mean"] > 10
    assert "tail_mass_mean" not in traces.metrics


def test_the_loss_over_draws_is_the_forward_kl_of_the_live_teacher(
    collect: Callable[..., Artifact], tiny_model: Path
) -> None:
    model, tokenizer = load_model(tiny_model), load_tokenizer(tiny_model)
    exact, estimated = [], []
    for sequence in training_examples(collect(trace_store="sampled", top_k=3000), 256).values():
        assert isinstance(sequence.teacher, StoredDraws)
        logits_TP = model(input_ids=torch.tensor([sequence.token_ids])).logits[0, sequence.first_scored - 1 : -1]
        teacher_TV = log_probabilities(logits_TP, len(tokenizer))
        student_TV = log_probabilities(logits_TP.roll(1, -1) * 0.7, len(tokenizer))
        stored = sequence.teacher
        exact.append(forward_kl(student_TV, teacher_TV))
        estimated.append(sampled_forward_kl(student_TV, stored.token_ids_TU, stored.weights_TU, stored.entropy_nats_T))
    torch.testing.assert_close(torch.cat(estimated), torch.cat(exact), atol=2e-2, rtol=2e-2)


def test_a_student_learns_from_draws(tiny_model: Path, tmp_path: Path) -> None:
    chain = tiny_chain.make(tmp_path, tiny_model, trace_store="sampled", top_k=64)
    student = chain.distilled(on_policy_fraction=0.0, finetune_steps=12)
    assert student.metrics["validation_loss_last_nats"] < student.metrics["validation_loss_before_nats"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"objective": "reverse_kl"}, "objective 'reverse_kl': needs the teacher's support"),
        ({"objective": "beta_jsd", "beta": 0.5}, r"objective 'beta_jsd' with beta 0\.5: needs the teacher's support"),
        ({"trace_k": 16}, "trace_k 16: the traces were collected with 32"),
    ],
)
def test_what_draws_cannot_serve_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        require_usable(DistillConfig(**options), "sampled", 32)


@pytest.mark.parametrize("options", [{"objective": "forward_kl"}, {"objective": "beta_jsd", "beta": 0.0}])
def test_the_forward_kl_is_served_by_both(options: dict[str, Any]) -> None:
    for store in ("topk", "sampled"):
        require_usable(DistillConfig(trace_k=32, **options), store, 32)
    require_usable(DistillConfig(objective="reverse_kl"), "topk", 32)


def test_a_student_is_not_trained_on_draws_that_do_not_serve_it(tiny_model: Path, tmp_path: Path) -> None:
    chain = tiny_chain.make(tmp_path, tiny_model, trace_store="sampled")
    with pytest.raises(ValueError, match="objective 'reverse_kl': needs the teacher's support"):
        chain.distilled(objective="reverse_kl")


@pytest.mark.parametrize("column", ["sampled_token_ids", "sampled_counts", "entropy_nats"])
def test_missing_draws_are_refused_with_their_count(
    collect: Callable[..., Artifact], tiny_model: Path, tmp_path: Path, column: str
) -> None:
    whole = collect(trace_store="sampled")
    rows = sorted(whole.table("traces").to_pylist(), key=lambda row: (row["split"] != "train", row["trace_id"]))
    rows[0][column] = rows[0][column][:-1]
    if column != "entropy_nats":
        rows[1][column][0] = []
    schema = whole.table("traces").schema.with_metadata(whole.schema_metadata("traces"))
    config = CollectTracesConfig(teacher=str(tiny_model), prompts_uri=str(tmp_path / "prompts.jsonl"), seed=9)
    writer = writer_for(tmp_path / "broken", "collect_traces", config)
    writer.write_table("traces/00000", pa.Table.from_pylist(rows, schema=schema), schema)
    count = 1 if column == "entropy_nats" else 2
    with pytest.raises(ValueError, match=rf"traces: {count} lack distributions .* the first is {rows[0]['trace_id']}"):
        training_examples(writer.commit({}), 256)


def test_a_vocabulary_beyond_uint16_has_wider_ids() -> None:
    narrow, wide = (schemas.traces_topk(2, size).field("topk_token_ids").type for size in (65_536, 65_537))
    assert (narrow.value_type.value_type, wide.value_type.value_type) == (pa.uint16(), pa.uint32())
    sparse = SparseTeacher(
        token_ids_NK=torch.tensor([[70_000, 3]]), logprobs_NK=torch.tensor([[-0.5, -1.5]]),
        tail_logmass_N=torch.tensor([-2.0]), entropy_nats_N=torch.tensor([1.0]),
    )  # fmt: skip
    stored = topk_columns([sparse], schemas.traces_topk(2, 100_000))
    assert stored["topk_token_ids"].to_pylist() == [[[70_000, 3]]]
    with pytest.raises(pa.ArrowInvalid, match="70000 not in range"):
        topk_columns([sparse], schemas.traces_topk(2, 65_536))


def test_float16_is_as_exact_as_the_schema_says() -> None:
    assert "above -8 to 0.002 nats, above -16 to 0.004, above -32 to 0.008" in (schemas.traces_topk.__doc__ or "")
    for low, high, error in ((0, 8, 0.002), (8, 16, 0.004), (16, 32, 0.008)):
        exact = -np.linspace(low, high, 100_001)[:-1]
        assert np.abs(exact.astype(np.float16) - exact).max() <= error


def test_the_top_k_columns_are_stored_in_split_bytes_and_come_back_bit_by_bit(collect: Callable[..., Artifact]) -> None:
    traces = collect()
    file = pq.ParquetFile(pa.BufferReader(traces.file("traces/00000")))
    for number in range(file.metadata.num_columns):
        column = file.metadata.row_group(0).column(number)
        name = column.path_in_schema.split(".")[0]
        assert ("BYTE_STREAM_SPLIT" in column.encodings) == (
            name in ("topk_token_ids", "topk_logprobs", "tail_logmass")
        )
    table = traces.table("traces")
    again = tables.encode("traces", table, table.schema)
    assert tables.read("traces", pa.BufferReader(again), None).equals(table)


def test_states_and_attention_lie_beside_the_traces_of_every_shard(
    collect: Callable[..., Artifact], tiny_model: Path
) -> None:
    options: dict[str, Any] = {"state_layers": [0], "state_window": 4, "attention_layers": [1], "attention_top": 3}
    traces = collect(**options)
    lengths = {row["trace_id"]: row for row in traces.table("traces").to_pylist()}
    assert [shard.name for shard in traces.shards("states")] == ["states/00000", "states/00001", "states/00002"]
    states = traces.table("states")
    assert states.schema.equals(captured_schemas.kv_states(*kv_shape(tiny_model), "head"))
    expected = {(name, step) for name, row in lengths.items() for step in range(min(5, len(row["step_starts"])))}
    assert {(row["trace_id"], row["step"]) for row in states.to_pylist()} == expected
    looked = [(row["trace_id"], row["position"]) for row in traces.table("attention").to_pylist()]
    assert set(looked) == {
        (name, place) for name, row in lengths.items() for place in range(len(row["response_token_ids"]))
    }
    assert traces.schema_metadata("states")["tokenizer"] == traces.schema_metadata("traces")["tokenizer"]
    without = collect(store="without")
    assert without.table("traces")["topk_logprobs"] == traces.table("traces")["topk_logprobs"]
    assert without.shards("states") == without.shards("attention") == []


def test_a_second_attempt_makes_what_is_missing_beside_the_traces(
    collect: Callable[..., Artifact], tiny_model: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"state_layers": [1], "attention_layers": [0]}
    whole = collect(store="whole", **options)
    config = CollectTracesConfig(
        teacher=str(tiny_model), prompts_uri=str(tmp_path / "prompts.jsonl"), max_new_tokens=10, batch_size=4, **options
    )
    collect_traces.run(config, traces=writer_for(tmp_path / "part", "collect_traces", config))  # never commits
    for name in ("traces/00000", "states/00001", "attention/00002"):
        next((tmp_path / "part").rglob(f"pending/{name}.json")).unlink()
    assert collect(store="part", **options).digest == whole.digest


def test_a_layer_that_the_teacher_has_not_is_refused_before_it_answers(collect: Callable[..., Artifact]) -> None:
    with pytest.raises(ValueError, match=r"state_layers \[7\]: the teacher has layers 0 to 1"):
        collect(state_layers=[7])
    with pytest.raises(ValueError, match="trace_store 'dense': allowed are topk, sampled"):
        collect(trace_store="dense")
