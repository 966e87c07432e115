"""Prompts from files that people made: each row is asked or set aside with a reason, and none is lost."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux.components.collect_traces.prompts import Prompt, load_prompts
from reflux.components.collect_traces.traits import with_traits
from reflux.components.models import chat_token_ids, load_tokenizer

GOOD = [{"prompt_id": f"p{i}", "prompt": f"Count to {i}."} for i in range(9)]  # p0 and p7 are held out


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(tiny_model)


def load(file: Path, tokenizer: Any) -> tuple[list[Prompt], list[dict[str, Any]]]:
    return load_prompts(file, tokenizer, heldout_fraction=0.2, max_prompt_tokens=120, max_total_tokens=120)


def load_rows(rows: list[Any], tokenizer: Any) -> tuple[list[Prompt], list[dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "prompts.jsonl")
        file.write_text("\n".join(map(json.dumps, rows)), "utf-8")
        return load(file, tokenizer)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "Hello", "id": 3}, "prompt: is missing; the row has ['id', 'text']"),
        ({"prompt": None}, "prompt None: must be a text"),
        ({"prompt": float("nan")}, "prompt nan: must be a text"),
        ({"prompt": ["Hello"]}, "prompt ['Hello']: must be a text"),
        ({"prompt": "\u3000\u200b\t"}, "must be a text that is not empty"),
        ({"prompt": "a\x00b"}, "prompt: control character U+0000 at character 1"),
        ({"prompt": "red \x1b[31m"}, "prompt: control character U+001B at character 4"),
        ({"prompt": "Stop.<|end|>\n<|start|>assistant"}, "a control token of the teacher's tokenizer"),
        ({"prompt": "a [ANCHOR]b"}, "prompt: [ANCHOR] at character 2 is not closed"),
        ({"prompt": "x" * 200}, "tokens after the chat template, max_prompt_tokens is 120"),
        ({"prompt": "a", "prompt_id": 7.0}, "prompt_id 7.0: must be text or a whole number"),
        ({"prompt": "a", "prompt_id": {"x": 1}}, "prompt_id {'x': 1}: must be text"),
        ({"prompt": "a", "prompt_id": "p" * 300}, "300 characters; at most 256 are allowed"),
        ({"prompt": "a", "dimension": "multi\x07hop"}, "dimension: control character U+0007"),
        ({"prompt": "a", "prompt_id": "p3"}, "prompt_id 'p3': already used in prompts.jsonl, row 4"),
    ],
)
def test_a_row_that_cannot_be_asked_is_set_aside_with_its_reason(
    row: dict[str, Any], reason: str, tokenizer: Any
) -> None:
    prompts, (rejected,) = load_rows([*GOOD, row], tokenizer)
    assert [prompt.prompt_id for prompt in prompts] == [good["prompt_id"] for good in GOOD]
    assert rejected["row"] == 10
    assert reason in rejected["reason"]


@pytest.mark.parametrize(
    "text", ["two\r\nlines\tand a tab", "Grüße 你好 \U0001f600", "e\u0301 \u200d \ue000 \u2028 \ufeff", "1e999", "null"]
)
def test_unusual_text_is_asked_as_it_is(text: str, tokenizer: Any) -> None:
    prompts, rejected = load_rows([*GOOD, {"prompt": text}], tokenizer)
    assert rejected == []
    assert prompts[-1].text == text


def test_a_number_is_an_id_and_the_same_as_its_digits(tokenizer: Any) -> None:
    rows = [{"prompt_id": 7, "prompt": "a"}, {"prompt_id": "7", "prompt": "b"}]
    prompts, (rejected,) = load_rows([*GOOD, *rows], tokenizer)
    assert prompts[-1].prompt_id == "7"
    assert rejected["reason"] == "prompt_id '7': already used in prompts.jsonl, row 10"


def test_a_marked_prompt_is_the_prompt_without_markers(tokenizer: Any) -> None:
    text = "A child has fever and a rash."
    plain, _ = load_rows([*GOOD, {"prompt": text}], tokenizer)
    marked, _ = load_rows([*GOOD, {"prompt": "A child has [ANCHOR]fever[/ANCHOR] and a rash."}], tokenizer)
    assert plain[-1].anchors == []
    ((first, end),) = marked[-1].anchors
    assert tokenizer.decode(marked[-1].token_ids[first:end]) == "fever"
    assert (marked[-1].text, marked[-1].prompt_id) == (text, plain[-1].prompt_id)
    assert marked[-1].token_ids == plain[-1].token_ids == list(chat_token_ids(tokenizer, text))


def test_parquet_of_other_types_and_a_folder_of_mixed_schemas(tokenizer: Any, tmp_path: Path) -> None:
    columns = {
        "prompt": pa.array(["a", None, "c"], pa.large_string()),
        "prompt_id": pa.array([1, 2, 3], pa.uint8()),
        "dimension": pa.array(["trivial", "trivial", None]).dictionary_encode(),
        "score": pa.array([[0.5], None, []], pa.list_(pa.float16())),
    }
    pq.write_table(pa.table(columns), tmp_path / "one.parquet")
    (tmp_path / "two.csv").write_text("dimension,prompt\nmulti_hop,b\n")
    (tmp_path / "zero.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GOOD))
    (tmp_path / "empty.jsonl").write_text("")
    prompts, (rejected,) = load(tmp_path, tokenizer)
    found = [(prompt.text, prompt.dimension) for prompt in prompts[:3]]
    assert found == [("a", "trivial"), ("c", "unspecified"), ("b", "multi_hop")]
    assert [prompt.prompt_id for prompt in prompts[:2]] == ["1", "3"]
    assert (rejected["source"], rejected["row"]) == ("one.parquet", 2)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
markers = st.sampled_from(["[ANCHOR]", "[/ANCHOR]", "<|end|>", "\x00", " ", "word", "\u200b"])
nearly_prompts = st.fixed_dictionaries(
    {},
    optional={
        "prompt": st.lists(markers | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)).map("".join)
        | anything,
        "prompt_id": st.sampled_from(["p0", "p1", "new"]) | anything,
        "dimension": st.sampled_from(["multi_hop", "trivial"]) | anything,
    },
)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), noise=st.lists(nearly_prompts, max_size=6))
def test_every_row_is_asked_or_set_aside(data: st.DataObject, noise: list[dict[str, Any]], tokenizer: Any) -> None:
    noise = [row for row in noise if "\\ud" not in json.dumps(row)]  # such a line is no text, and ends the reading
    rows = data.draw(st.permutations([*GOOD, *noise]))
    prompts, rejected = load_rows(rows, tokenizer)
    assert len(prompts) + len(rejected) == len(rows)
    assert {good["prompt_id"] for good in GOOD} <= {prompt.prompt_id for prompt in prompts}
    for prompt in prompts:
        assert prompt.text.strip()
        assert len(prompt.token_ids) <= 120
        assert all(0 <= first < end <= len(prompt.token_ids) for first, end in prompt.anchors)


@pytest.mark.heavy
def test_public_files_are_asked_whole(tokenizer: Any, tmp_path: Path) -> None:
    """With REFLUX_DATA: GSM8K's questions, HumanEval's own file as it is, packed, and WikiText's paragraphs."""
    data = Path(os.environ["REFLUX_DATA"])
    questions = [json.loads(line)["question"] for line in (data / "gsm8k_test.jsonl").open()]
    paragraphs = [line.strip() for line in (data / "wikitext2_test.txt").open() if len(line.split()) > 20]
    for name, texts in {"gsm8k": questions, "wikitext": list(dict.fromkeys(paragraphs))}.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"prompt": text, "dimension": name}) + "\n" for text in texts))
        prompts, rejected = load_prompts(
            file, tokenizer, heldout_fraction=0.2, max_prompt_tokens=9999, max_total_tokens=9999
        )
        assert rejected == []
        assert [prompt.text for prompt in prompts] == texts
        assert 0.17 < sum(prompt.split == "heldout" for prompt in prompts) / len(prompts) < 0.23
        languages = Counter(prompt.language for prompt in with_traits(prompts, None))
        assert languages["en"] / len(prompts) > 0.97, languages
    code, rejected = load_prompts(
        data / "HumanEval.jsonl.gz", tokenizer, heldout_fraction=0.2, max_prompt_tokens=9999, max_total_tokens=9999
    )
    assert (len(code), rejected) == (164, [])
