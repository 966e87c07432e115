"""The user's prompts, checked: which are asked, on which side of the split, and which are refused with what reason."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reflux.components.collect_traces.anchors import Span, token_spans, without_markers
from reflux.components.models import chat_token_ids
from reflux.components.records import Record, read_records, read_text_field, shown

UNSPECIFIED = "unspecified"
"""Dimension of a prompt that names none."""
LONGEST_NAME = 256
"""Characters of a prompt_id or dimension: they stand in every row, and in messages."""
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")  # all but tab and line breaks


@dataclass(frozen=True, kw_only=True)
class Prompt:
    prompt_id: str
    dimension: str
    text: str
    """Without the markers of its anchors."""
    token_ids: list[int]
    """[P] after the chat template."""
    split: str
    anchors: list[Span] = field(default_factory=list)
    """[A] first token and one past the last of each marked span, in `token_ids`."""
    language: str = "und"
    language_confidence: float = 0.0
    entity_count: int | None = None


def load_prompts(
    path: Path, tokenizer: Any, *, heldout_fraction: float, max_prompt_tokens: int, max_total_tokens: int
) -> tuple[list[Prompt], list[dict[str, Any]]]:
    """The usable prompts in file order, and the refused ones as rows of the table `rejected`.

    `max_total_tokens` is what prompt and answer may have together less the longest answer. ValueError for a file with a
    malformed row or without a usable prompt.
    """
    prompts: dict[str, Prompt] = {}
    rejected: list[dict[str, Any]] = []
    places: dict[str, str] = {}
    for record in read_records(path):
        if record.problem:
            raise ValueError(f"prompts {record.place}: {record.problem}")
        try:
            prompt = _checked(record, tokenizer, heldout_fraction, max_prompt_tokens, max_total_tokens)
            if prompt.prompt_id in prompts:
                raise ValueError(f"prompt_id {prompt.prompt_id!r}: already used in {places[prompt.prompt_id]}")
        except ValueError as error:
            rejected.append(record.rejected(str(error)))
            continue
        prompts[prompt.prompt_id] = prompt
        places[prompt.prompt_id] = record.place
    if not prompts:
        first = f"all {len(rejected)} were rejected, the first for {rejected[0]['reason']}" if rejected else ""
        cause = first or "it is empty"
        raise ValueError(f"prompts {path.name}: no usable prompt; {cause}")
    return list(prompts.values()), rejected


def split_of(prompt_id: str, heldout_fraction: float) -> str:
    """heldout for about that fraction of all ids. By id alone, so a prompt never changes sides when others come or go;
    the price is that the share within a dimension is only about the same."""
    hashed = int.from_bytes(hashlib.sha256(prompt_id.encode()).digest()[:8], "big") / 2**64
    return "heldout" if hashed < heldout_fraction else "train"


def _checked(
    record: Record, tokenizer: Any, heldout_fraction: float, max_prompt_tokens: int, max_total_tokens: int
) -> Prompt:
    text, spans = without_markers(_text(record.values))
    for token in tokenizer.all_special_tokens:
        if token in text:  # it would be read as what it stands for: the end of the turn, another speaker
            raise ValueError(f"prompt: holds {token!r}, a control token of the teacher's tokenizer")
    token_ids = list(chat_token_ids(tokenizer, text))
    if len(token_ids) > max_prompt_tokens:
        raise ValueError(
            f"prompt: {len(token_ids)} tokens after the chat template, max_prompt_tokens is {max_prompt_tokens}"
        )
    if len(token_ids) > max_total_tokens:
        raise ValueError(
            f"prompt: {len(token_ids)} tokens after the chat template; beside max_new_tokens the teacher's context "
            f"leaves {max_total_tokens}"
        )
    prompt_id = _name(record.values, "prompt_id") or hashlib.sha256(text.encode()).hexdigest()
    return Prompt(
        prompt_id=prompt_id,
        dimension=_name(record.values, "dimension") or UNSPECIFIED,
        text=text,
        token_ids=token_ids,
        split=split_of(prompt_id, heldout_fraction),
        anchors=token_spans(tokenizer, text, spans),
    )


def _text(values: dict[str, Any]) -> str:
    if "prompt" not in values:
        raise ValueError(f"prompt: is missing; the row has {shown(sorted(map(str, values)))}")
    text = values["prompt"]
    if not isinstance(text, str) or all(unicodedata.category(character)[0] in "CZ" for character in text):
        raise ValueError(f"prompt {shown(text)}: must be a text that is not empty")
    _require_printable("prompt", text)
    return text


def _name(values: dict[str, Any], field_name: str) -> str:
    name = read_text_field(values, field_name)
    if len(name) > LONGEST_NAME:
        raise ValueError(f"{field_name} {shown(name)}: {len(name)} characters; at most {LONGEST_NAME} are allowed")
    _require_printable(field_name, name)
    return name


def _require_printable(field_name: str, text: str) -> None:
    if found := _CONTROL.search(text):
        raise ValueError(
            f"{field_name}: control character U+{ord(found[0]):04X} at character {found.start()}; tabs and line breaks "
            "are the only ones allowed"
        )


def require_both_splits(path: Path, prompts: list[Prompt], heldout_fraction: float) -> None:
    """ValueError if all prompts fall on one side."""
    heldout = sum(prompt.split == "heldout" for prompt in prompts)
    if heldout in (0, len(prompts)):
        raise ValueError(
            f"prompts {path.name}: heldout_fraction {heldout_fraction} holds out {heldout} of {len(prompts)} prompts; "
            "training and evaluation need at least one each: add prompts or change the fraction"
        )
