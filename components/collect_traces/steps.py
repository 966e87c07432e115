"""Where each reasoning step of an answer begins, as token offsets: a step is a sentence or a line.

Experts rate steps and attention losses sum over them, so the offsets are stored with the trace instead of being
recomputed by readers that might split elsewhere.
"""

from __future__ import annotations

import re
from typing import Any

_BOUNDARY = re.compile(r"""[.!?…]+["'”’)\]*_]*(?=\s)|[。！？]+[」』”）]*|\n+""")  # noqa: RUF001
_LIST_MARKER = re.compile(r"^[\s*_#>-]*(\d{1,3}|[A-Za-z])[.)]$")
_ABBREVIATION = re.compile(r"(?:^|[\s(])(?:e\.g|i\.e|vs|Dr|Mr|Mrs|Ms|Prof|St|Fig)\.$")


def token_pieces(tokenizer: Any, token_ids: list[int]) -> list[str]:
    """[T] the text that each token adds; "" for special tokens and while the bytes of a character are incomplete.

    Every token is decoded behind the one before it, because tokenizers drop the space in front of a text's first word.
    """
    pieces: list[str] = []
    anchor = read = 0
    for end in range(1, len(token_ids) + 1):
        before = tokenizer.decode(token_ids[anchor:read], skip_special_tokens=True)
        text = tokenizer.decode(token_ids[anchor:end], skip_special_tokens=True)
        if text.endswith("\ufffd") and end < len(token_ids):
            pieces.append("")
        else:
            pieces.append(text[len(before) :])
            anchor, read = read, end
    return pieces


def step_starts(pieces: list[str]) -> list[int]:
    """[S] index of the token in which each step begins, the first always 0.

    A step ends at sentence punctuation before white space, at full-width punctuation, and at a line's end; not after
    "1.", "a)" or a common abbreviation.
    """
    text = "".join(pieces)
    starts, begin = [0], 0
    for boundary in _BOUNDARY.finditer(text):
        step = text[begin : boundary.end()].rstrip("\n")
        if not step.strip() or _LIST_MARKER.match(step) or _ABBREVIATION.search(step):
            continue
        following = re.compile(r"\s*").match(text, boundary.end()).end()  # type: ignore[union-attr]
        if following >= len(text):
            break
        begin = following
        starts.append(_token_at(pieces, following))
    return sorted(set(starts))


def _token_at(pieces: list[str], offset: int) -> int:
    """The token that holds the character at `offset`."""
    end = 0
    for index, piece in enumerate(pieces):
        end += len(piece)
        if offset < end:
            return index
    raise AssertionError(f"offset {offset} lies beyond the text's {end} characters")
