"""Marked spans: what a model sees, where the tokens of a span stand, and which markers are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflux.components.collect_traces.anchors import token_spans, without_markers
from reflux.components.models import chat_token_ids, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    return load_tokenizer(tiny_model)


@pytest.mark.parametrize(
    ("marked", "text", "anchored"),
    [
        ("no anchor, [anchor] or ANCHOR", "no anchor, [anchor] or ANCHOR", []),
        ("[ANCHOR]Fever[/ANCHOR] came first.", "Fever came first.", ["Fever"]),
        ("A [ANCHOR]rash[/ANCHOR] and [ANCHOR] pain [/ANCHOR]", "A rash and  pain ", ["rash", "pain"]),
        ("[ANCHOR]a[/ANCHOR][ANCHOR]a[/ANCHOR]", "aa", ["a", "a"]),
    ],
)  # fmt: skip
def test_markers_are_taken_out_and_spans_kept(marked: str, text: str, anchored: list[str]) -> None:
    without, spans = without_markers(marked)
    assert without == text
    assert [without[first:end] for first, end in spans] == anchored


@pytest.mark.parametrize(
    ("marked", "message"),
    [
        ("a [ANCHOR]b", r"\[ANCHOR\] at character 2 is not closed by \[/ANCHOR\]"),
        ("a[/ANCHOR] b", r"\[/ANCHOR\] at character 1 closes nothing"),
        ("[ANCHOR]a[ANCHOR] b", r"\[ANCHOR\] at character 9 stands within the one at 0; a span ends with \[/ANCHOR\]"),
        ("x [ANCHOR] \n[/ANCHOR]", r"\[ANCHOR\] at character 2 marks nothing"),
    ],
)
def test_markers_that_do_not_pair_up_are_refused(marked: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"prompt: {message}"):
        without_markers(marked)


pieces = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="[]"), max_size=8)


@given(st.lists(st.tuples(pieces, pieces.filter(str.strip)), max_size=4), pieces)
def test_marking_and_taking_out_gives_the_text_back(marked: list[tuple[str, str]], rest: str) -> None:
    text, spans = without_markers("".join(f"{a}[ANCHOR]{b}[/ANCHOR]" for a, b in marked) + rest)
    assert text == "".join(a + b for a, b in marked) + rest
    assert [text[first:end] for first, end in spans] == [b.strip() for _, b in marked]


@pytest.mark.parametrize(
    "marked",
    [
        "user: [ANCHOR]user[/ANCHOR] and assistant",  # the template writes these words too
        "[ANCHOR]Grüße 你好[/ANCHOR]",
        "x" * 40 + "[ANCHOR]\U0001f600[/ANCHOR]",
    ],
)
def test_token_spans_hold_the_tokens_of_the_marked_text(tokenizer: Any, marked: str) -> None:
    text, spans = without_markers(marked)
    token_ids = chat_token_ids(tokenizer, text)
    for (first, end), (first_token, end_token) in zip(spans, token_spans(tokenizer, text, spans), strict=True):
        assert tokenizer.decode(token_ids[first_token:end_token]) == text[first:end]


def test_a_template_that_trims_moves_the_spans_and_one_that_rewrites_is_refused(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    plain = tokenizer.chat_template
    tokenizer.chat_template = plain.replace("message['content']", "message['content'] | trim")
    text, spans = without_markers("  \nfirst [ANCHOR]second[/ANCHOR] ")
    ((first, end),) = token_spans(tokenizer, text, spans)
    assert tokenizer.decode(chat_token_ids(tokenizer, text)[first:end]) == "second"
    tokenizer.chat_template = plain.replace("message['content']", "message['content'] | upper")
    with pytest.raises(ValueError, match="the chat template rewrites the text"):
        token_spans(tokenizer, text, spans)
