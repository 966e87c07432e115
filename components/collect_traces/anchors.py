"""Spans that a prompt marks with [ANCHOR]…[/ANCHOR]: what must not be lost from sight over a long answer.

The markers are instructions to us, not text for a model: they are taken out before the chat template, and what stood
between them is kept as token offsets. Opening and closing marker differ, so that a forgotten one shows.
"""

from __future__ import annotations

import re
from typing import Any

from reflux.components.models import chat_messages

OPENING, CLOSING = "[ANCHOR]", "[/ANCHOR]"
_MARKER = re.compile(r"\[/?ANCHOR\]")
_PROBE = "\ue000"  # private use: no template writes it
Span = tuple[int, int]


def without_markers(marked: str) -> tuple[str, list[Span]]:
    """The text without markers, and [first, end) of each span in its characters, white space at its edges left out.

    ValueError for markers that do not pair up, that stand within each other, or with nothing between them.
    """
    pieces: list[str] = []
    spans: list[Span] = []
    length = read = 0
    opened: tuple[int, int] | None = None  # character in the marked text, and in the text without markers
    for marker in _MARKER.finditer(marked):
        pieces.append(marked[read : marker.start()])
        length += len(pieces[-1])
        read = marker.end()
        if marker[0] == OPENING:
            if opened:
                raise ValueError(
                    f"prompt: {OPENING} at character {marker.start()} stands within the one at {opened[0]}; a span "
                    f"ends with {CLOSING}"
                )
            opened = marker.start(), length
        elif not opened:
            raise ValueError(f"prompt: {CLOSING} at character {marker.start()} closes nothing")
        else:
            spans.append(_trimmed(pieces[-1], opened))
            opened = None
    if opened:
        raise ValueError(f"prompt: {OPENING} at character {opened[0]} is not closed by {CLOSING}")
    return "".join([*pieces, marked[read:]]), spans


def _trimmed(inner: str, opened: tuple[int, int]) -> Span:
    if not inner.strip():
        raise ValueError(f"prompt: {OPENING} at character {opened[0]} marks nothing")
    first = opened[1] + len(inner) - len(inner.lstrip())
    return first, first + len(inner.strip())


def token_spans(tokenizer: Any, text: str, spans: list[Span]) -> list[Span]:
    """[A] first token and one past the last of each span, within `chat_token_ids` of the text.

    A token that holds a character of the span belongs to it. ValueError where tokens cannot be traced back to
    characters: by a tokenizer written in Python, or after a template that rewrites the user's text.
    """
    if not spans:
        return []
    if not tokenizer.is_fast:
        raise ValueError("prompt: its anchors cannot be placed, since this tokenizer does not tell where tokens stand")
    offsets = tokenizer.apply_chat_template(
        chat_messages(text),
        add_generation_prompt=True,
        return_dict=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )["offset_mapping"]
    begin = _begin_in_template(tokenizer, text)
    placed = []
    for first, end in spans:
        held = [index for index, (a, b) in enumerate(offsets) if a < begin + end and b > begin + first]
        placed.append((held[0], held[-1] + 1))
    return placed


def _begin_in_template(tokenizer: Any, text: str) -> int:
    """Character of the rendered chat at which the text's first one stands, or would stand where templates trim it."""
    rendered, probed = (
        tokenizer.apply_chat_template(chat_messages(content), add_generation_prompt=True, tokenize=False)
        for content in (text, _PROBE)
    )
    begin = probed.find(_PROBE)
    trimmed = len(text) - len(text.lstrip())
    if begin >= 0 and rendered.startswith(text, begin):
        return begin
    if begin >= 0 and rendered.startswith(text.strip(), begin):
        return begin - trimmed
    raise ValueError("prompt: its anchors cannot be placed, since the chat template rewrites the text")
