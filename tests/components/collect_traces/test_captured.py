"""KV states and attention of the tiny teacher: against its cache and its eager attention, cut, and as tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM

from reflux.components import captured_schemas, tables
from reflux.components.collect_traces.captured import Captured, capture, require_layers
from reflux.components.collect_traces.captured_tables import attention_table, state_table
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.models import kv_shape, load_model

PROMPT = [1, *range(40, 70)]
RESPONSE = [*range(100, 118), 2]
STARTS = [0, 4, 9, 15]


@pytest.fixture(scope="module")
def teacher(tiny_model: Path) -> Any:
    return load_model(tiny_model)


def asked(**options: Any) -> CollectTracesConfig:
    return CollectTracesConfig(teacher="tiny", prompts_uri="none", **options)


def captured(teacher: Any, **options: Any) -> Captured:
    return capture(teacher, PROMPT, RESPONSE, STARTS, asked(**options))


def test_attention_is_that_of_the_eager_model(teacher: Any, tiny_model: Path) -> None:
    eager = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation="eager").eval()
    maps = eager(input_ids=torch.tensor([PROMPT + RESPONSE]), output_attentions=True).attentions
    tokens = len(PROMPT + RESPONSE)
    found = captured(teacher, attention_layers=[1, 0], attention_top=tokens).attention
    assert found.keys() == {0, 1}
    for layer, sparse in found.items():
        full_TL = maps[layer][0].mean(0)[len(PROMPT) :]
        places = sparse.positions_RM.long()
        ours_TL = torch.zeros_like(full_TL).scatter_add(1, places.clamp(min=0), sparse.weights_RM * (places >= 0))
        torch.testing.assert_close(ours_TL, full_TL, atol=1e-5, rtol=0)
    assert teacher.config._attn_implementation == "sdpa"


def test_few_positions_say_how_much_they_cover(teacher: Any) -> None:
    (sparse,) = captured(teacher, attention_layers=[0], attention_top=3).attention.values()
    (whole,) = captured(teacher, attention_layers=[0], attention_top=99).attention.values()
    torch.testing.assert_close(sparse.weights_RM, whole.weights_RM[:, :3])
    torch.testing.assert_close(sparse.coverage_R, whole.weights_RM[:, :3].sum(-1))
    assert (sparse.coverage_R < 1).all()
    torch.testing.assert_close(whole.coverage_R, torch.ones(len(RESPONSE)))


@pytest.mark.parametrize("pooling", ["head", "full"])
def test_a_state_is_the_cache_before_its_decision(teacher: Any, pooling: str) -> None:
    states = captured(teacher, state_layers=[1], state_steps=3, state_window=8, state_pooling=pooling).states
    assert [(s.layer, s.step, s.position, s.window_tokens) for s in states] == [
        (1, 0, 0, 8),
        (1, 1, 4, 8),
        (1, 2, 9, 8),
    ]
    for state in states:
        seen = (PROMPT + RESPONSE)[: len(PROMPT) + state.position]
        held = teacher(input_ids=torch.tensor([seen]), use_cache=True).past_key_values.layers[1]
        both_HWd = torch.cat([held.keys[0], held.values[0]], -1)[:, -8:]
        expected = both_HWd.mean(1) if pooling == "head" else both_HWd.transpose(0, 1)
        assert state.state.dtype == torch.float16
        torch.testing.assert_close(state.state.float(), expected, atol=2e-3, rtol=1e-3)


def test_a_window_longer_than_what_was_said_holds_what_there_is(teacher: Any) -> None:
    states = captured(teacher, state_layers=[0], state_window=1000, state_pooling="full").states
    assert [state.window_tokens for state in states] == [len(PROMPT) + start for start in STARTS]
    assert all(len(state.state) == state.window_tokens for state in states)


def test_what_lies_beyond_the_cut_is_left_out(teacher: Any) -> None:
    options: dict[str, Any] = {"state_layers": [0], "attention_layers": [1], "attention_top": 5}
    whole, cut = captured(teacher, **options), captured(teacher, capture_max_tokens=len(PROMPT) + 5, **options)
    assert [state.position for state in cut.states] == [0, 4]
    assert cut.attention[1].coverage_R.shape == (5,)
    torch.testing.assert_close(cut.attention[1].weights_RM, whole.attention[1].weights_RM[:5])
    for ours, theirs in zip(cut.states, whole.states, strict=False):
        torch.testing.assert_close(ours.state, theirs.state)
    nothing = captured(teacher, capture_max_tokens=len(PROMPT), **options)
    assert (nothing.states, nothing.attention) == ([], {})


def test_layers_that_the_teacher_has_not_are_refused(teacher: Any) -> None:
    with pytest.raises(ValueError, match=r"attention_layers \[2, 9\]: the teacher has layers 0 to 1"):
        require_layers(teacher, asked(attention_layers=[0, 2, 9]))
    with pytest.raises(ValueError, match=r"state_layers \[-1\]: must be different layers, counted from 0"):
        asked(state_layers=[-1])


@pytest.mark.parametrize("pooling", ["head", "full"])
def test_both_become_tables_that_keep_every_number(teacher: Any, tiny_model: Path, pooling: str) -> None:
    found = captured(
        teacher, state_layers=[0, 1], state_window=6, state_pooling=pooling, attention_layers=[0, 1], attention_top=4
    )
    states_schema = captured_schemas.kv_states(*kv_shape(tiny_model), pooling)
    rows = read_back("states", state_table([("a", found), ("b", found)], states_schema), states_schema)
    assert [row["trace_id"] for row in rows] == ["a"] * 8 + ["b"] * 8
    for row, state in zip(rows, found.states * 2, strict=True):
        assert (row["layer"], row["step"], row["position"]) == (state.layer, state.step, state.position)
        assert torch.equal(torch.tensor(row["state"], dtype=torch.float16), state.state)

    attention_schema = captured_schemas.attention(4)
    rows = read_back("attention", attention_table([("a", found), ("b", found)], attention_schema), attention_schema)
    assert len(rows) == 2 * 2 * len(RESPONSE)
    for number, row in enumerate(rows):
        sparse = found.attention[row["layer"]]
        assert row["trace_id"] == "ab"[number // (2 * len(RESPONSE))]
        assert row["attended"] == sparse.positions_RM[row["position"]].tolist()
        assert row["weights"] == sparse.weights_RM[row["position"]].half().tolist()
        assert row["coverage"] == sparse.coverage_R[row["position"]].item()


def read_back(name: str, table: Any, schema: Any) -> list[dict[str, Any]]:
    return tables.read(name, pa.BufferReader(tables.encode(name, table, schema)), None).to_pylist()


def test_a_batch_in_which_nothing_was_captured_is_an_empty_table() -> None:
    nothing = Captured(states=[], attention={})
    for pooling in ("head", "full"):
        assert state_table([("a", nothing)], captured_schemas.kv_states(2, 16, pooling)).num_rows == 0
    assert attention_table([("a", nothing)], captured_schemas.attention(4)).num_rows == 0
