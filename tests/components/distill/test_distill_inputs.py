"""What distill takes and what it refuses: traces under a contract with every distribution, a schedule that moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import tiny_chain
from stage_writers import writer_for
from tiny_chain import Chain

from reflux.components import models
from reflux.components.artifacts import Artifact
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.distill import stage
from reflux.components.distill.config import DistillConfig
from reflux.components.distill.examples import require_contract, training_examples


@pytest.fixture(scope="module")
def chain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return tiny_chain.make(tmp_path_factory.mktemp("chain"), tiny_model)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("teacher_digest", "sha256:00"),
        ("tokenizer", "another"),
        ("chat_template", "another"),
        ("scored_temperature", "0.7"),
        ("trace_store", "dense"),
    ],
)
def test_distributions_made_under_another_contract_are_refused(chain: Chain, field: str, value: str) -> None:
    metadata, tokenizer = chain.traces.schema_metadata("traces"), models.load_tokenizer(chain.model)
    require_contract(metadata, tokenizer, metadata["teacher_digest"])
    with pytest.raises(ValueError, match=f"traces: {field} is '{value}', distill needs .*; collect them again"):
        require_contract(metadata | {field: value}, tokenizer, metadata["teacher_digest"])


@pytest.mark.parametrize("column", ["topk_token_ids", "topk_logprobs", "tail_logmass"])
@pytest.mark.parametrize("kept", [0, 1])
def test_missing_distributions_are_refused_with_their_count(
    chain: Chain, tmp_path: Path, column: str, kept: int
) -> None:
    table = chain.traces.table("traces")
    rows = sorted(table.to_pylist(), key=lambda row: (row["split"] != "train", row["trace_id"]))
    for row in rows[:3]:
        row[column] = row[column][:kept]
    traces = committed(chain, tmp_path, pa.Table.from_pylist(rows, schema=table.schema))
    with pytest.raises(ValueError, match=rf"traces: 3 lack distributions .* the first is {rows[0]['trace_id']}"):
        training_examples(traces, 256)


def committed(chain: Chain, folder: Path, table: pa.Table) -> Artifact:
    """Traces as a store would hold them after something upstream went wrong."""
    config = CollectTracesConfig(teacher=str(chain.model), prompts_uri=str(chain.folder / "prompts.jsonl"))
    writer = writer_for(folder, "collect_traces", config)
    writer.write_table("traces/00000", table, table.schema)
    return writer.commit({})


def test_long_answers_are_cut_with_their_distributions(chain: Chain) -> None:
    whole_traces = training_examples(chain.traces, 256)
    longest_prompt = max(s.first_scored for s in whole_traces.values())
    cut = training_examples(chain.traces, longest_prompt + 2)
    assert cut.keys() == whole_traces.keys()
    for name, sequence in cut.items():
        assert sequence.token_ids == whole_traces[name].token_ids[: longest_prompt + 2]
        assert sequence.teacher is not None
        assert len(sequence.teacher.logprobs_TB) == sequence.scored
    with pytest.raises(ValueError, match="none of the training split has an answer within 5 tokens"):
        training_examples(chain.traces, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compute_dtype": "float16"}, "compute_dtype 'float16': allowed are float32, bfloat16, auto"),
        ({"export": "worst"}, "export 'worst': allowed are ema, last, best"),
        ({"ema_decay": 0.0}, "export 'ema': needs an ema_decay above 0"),
        ({"ema_decay": 1.0}, r"ema_decay 1\.0: must be in \[0, 1\)"),
        ({"beta": 1.5}, r"beta 1\.5: must be in \[0, 1\]"),
        ({"on_policy_fraction": float("nan")}, "on_policy_fraction nan"),
        ({"finetune_student_lr": -1.0}, r"finetune_student_lr -1\.0: must not be negative"),
        ({"finetune_student_lr": float("nan")}, "finetune_student_lr nan: must not be negative"),
        ({"joint_last_layers": -1}, "joint_last_layers -1: must not be negative"),
        ({"warmup_steps": 0, "joint_steps": 0, "finetune_steps": 0}, "at least one step"),
        ({"batch_sequences": 0}, "batch_sequences 0: must be positive"),
    ],
)
def test_a_bad_configuration_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"distill.*{message}"):
        DistillConfig(**options)


@pytest.mark.parametrize(
    ("options", "has_policy", "message"),
    [
        ({"joint_last_layers": 0, "joint_policy_every": 2}, True, "in some steps of the joint phase neither"),
        ({"finetune_student_lr": 0.0}, True, "in some steps of the finetune phase neither"),
        ({"joint_last_layers": 0, "joint_policy_every": 1}, False, "in some steps of the joint phase neither"),
        ({"joint_steps": 0, "finetune_steps": 0}, False, "no other step is asked"),
    ],
)
def test_a_schedule_in_which_nothing_would_move_is_refused(
    options: dict[str, Any], has_policy: bool, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        stage.schedule(DistillConfig(**options), has_policy=has_policy)


def test_keeping_back_every_trace_is_refused(chain: Chain) -> None:
    with pytest.raises(ValueError, match="validation_traces 8: there are only 8 training traces"):
        chain.distilled(validation_traces=8)
