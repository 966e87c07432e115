"""What the rows of lowbit.py are trained on, calibrated on and judged by, kept apart so that no text does two of these.

With a folder of public data (REFLUX_DATA): WikiText-2's test text judges, its validation text trains and calibrates the
rows that are called in-domain and no other, GSM8K's reference solutions judge. Without one, the language reference of
CPython judges. encyclopedia.py has other articles of Wikipedia. All else is our own: docstrings of the standard
library, questions about TOPICS, the demo's prompts, of which the held-out ones judge.

A prompt that begins with MARK is a passage of a text: in the copy of the model that the rows are made from, the chat
template leaves it as it is, so that rollouts go on with a text as they go on with a conversation.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reflux.components import models, sources
from reflux.components.collect_traces.prompts import split_of
from reflux.components.evaluate.text import evaluation_text
from reflux.components.records import read_records

from ..demo import PROMPTS

HELDOUT_FRACTION = 0.2
"""As in collect_traces: a prompt judges or trains by the hash of its id alone."""
TEST_TEXT, VALIDATION_TEXT, PROBLEMS = "wikitext2_test.txt", "wikitext2_valid.txt", "gsm8k_test.jsonl"
PUBLIC = (TEST_TEXT, VALIDATION_TEXT, PROBLEMS)
SHARED_WORDS = 13
"""In a row, which two texts have in common by copying and not by chance, as GPT-3's authors took it (arXiv 2005.14165).
"""
MARK = "¶"
SHORTEST_DOCSTRING = 400
"""Characters; below that they are lists of arguments."""
CALCULATOR = re.compile(r"<<[^>]*>>")
"""GSM8K's notes for a calculator, which no model writes of itself."""
TOPICS = {
    "a battle": "Hastings, Trafalgar, Gettysburg, Marathon, Agincourt, Salamis, Austerlitz, Midway",
    "a city": "Lisbon, Kyoto, Nairobi, Chicago, Vienna, Lima, Glasgow, Hanoi",
    "a ship": "the Bismarck, the Mary Rose, the Endeavour, the Lusitania, the Victory, the Constitution",
    "an animal": "the barn owl, the blue whale, the red fox, the king penguin, the honey bee, the giant squid",
    "a river or a mountain": "the Danube, the Nile, Mount Etna, Mont Blanc, the Mississippi, Kilimanjaro",
    "a composer": "Bach, Verdi, Debussy, Chopin, Haydn, Dvorak",
    "a ruler": "Elizabeth I, Charlemagne, Cleopatra, Peter the Great, Augustus, Ashoka",
    "a science": "geology, optics, genetics, meteorology, astronomy, acoustics",
    "an invention": "the steam engine, the telegraph, paper, the compass, the camera, the railway",
    "a kind of event": "a solar eclipse, a tropical cyclone, an election, a football season, a volcanic eruption",
    "a work of art": "a silent film, a popular song, a Gothic cathedral, a short story, a television episode, an opera",
}


def with_open_template(model: str, folder: Path) -> Path:
    """A copy of the model in `folder` whose template leaves passages alone; all else goes through the model's own."""
    path = sources.fetch(model)
    folder = folder / sources.digest(path).removeprefix("sha256:")[:12]
    if not (folder / "done").exists():
        tokenizer = models.load_tokenizer(path)
        models.load_model(path).save_pretrained(folder)
        start, passage = f"messages[0]['content'].startswith('{MARK}')", "{{ messages[0]['content'][1:] }}"
        tokenizer.chat_template = f"{{% if {start} %}}{passage}{{% else %}}{tokenizer.chat_template}{{% endif %}}"
        tokenizer.save_pretrained(folder)
        (folder / "done").touch()
    return folder


def judging_text(data: Path | None, tokenizer: Any, windows: int, window_tokens: int) -> dict[str, Any]:
    """The first windows of WikiText-2's test text, side by side, or as many spread over CPython's reference."""
    if data is None:
        text = evaluation_text(None, tokenizer, windows=windows, window_tokens=window_tokens)
        return {"name": text.name, "sha256": text.sha256, "windows": text.window_WT.tolist()}
    content = (data / TEST_TEXT).read_text(encoding="utf-8")
    ids = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) < windows * window_tokens:
        raise ValueError(f"{data / TEST_TEXT}: {len(ids)} tokens; {windows} windows of {window_tokens} are asked for")
    found = [ids[start : start + window_tokens] for start in range(0, windows * window_tokens, window_tokens)]
    return {"name": TEST_TEXT, "sha256": hashlib.sha256(content.encode()).hexdigest(), "windows": found}


def heldout_prompts(tokenizer: Any, count: int) -> list[dict[str, Any]]:
    """The demo's held-out prompts, as traces without an answer."""
    return [
        _trace(str(record.values["prompt_id"]), models.chat_token_ids(tokenizer, str(record.values["prompt"])), [])
        for record in _own_prompts("heldout")
    ][:count]


def problems(data: Path | None, tokenizer: Any, count: int) -> list[dict[str, Any]]:
    """GSM8K's first test problems with their reference solutions for answers; none without the data."""
    if data is None:
        return []
    rows = [json.loads(line) for line in (data / PROBLEMS).read_text(encoding="utf-8").splitlines()[:count]]
    return [
        _trace(
            f"gsm8k_{number:04}",
            models.chat_token_ids(tokenizer, row["question"]),
            [*tokenizer(CALCULATOR.sub("", row["answer"]))["input_ids"], tokenizer.eos_token_id],
        )
        for number, row in enumerate(rows)
    ]


def own_prompts(tokenizer: Any, passages: int, tokens: int) -> list[dict[str, str]]:
    """For training without a public text: passages of docstrings, questions about the topics, and as many of the demo's
    prompts as there are of these.
    """
    kept = [{name: str(r.values[name]) for name in ("prompt_id", "prompt")} for r in _own_prompts("train")]
    asked = [
        {"prompt_id": f"topic_{number:03}", "prompt": f"Write an encyclopedia article about {kind}: {name}."}
        for number, (kind, name) in enumerate((k, n) for k, names in TOPICS.items() for n in names.split(", "))
    ]
    return [
        *passages_of(own_text(), tokenizer, passages, tokens, "docstring"),
        *asked,
        *kept[:: len(kept) // len(asked)],
    ]


def passages_of(text: str, tokenizer: Any, count: int, tokens: int, name: str) -> list[dict[str, str]]:
    """`count` passages of `tokens` tokens as prompts, spread evenly over the text. ValueError if it is too short."""
    offsets = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)["offset_mapping"]
    blocks = len(offsets) // tokens
    if blocks < count:
        raise ValueError(f"{name}: {len(offsets)} tokens are too few for {count} passages of {tokens}")
    starts = [number * blocks // count * tokens for number in range(count)]
    return [
        {"prompt_id": f"{name}_{number:03}", "prompt": MARK + text[offsets[start][0] : offsets[start + tokens - 1][1]]}
        for number, start in enumerate(starts)
    ]


def require_apart(text: str, judging: str) -> None:
    """ValueError if a text that trains has SHARED_WORDS words in a row with one that judges."""
    ours, theirs = ({tuple(words[i : i + SHARED_WORDS]) for i in range(len(words) - SHARED_WORDS + 1)}
                    for words in (re.findall(r"\w+", t.lower()) for t in (text, judging)))  # fmt: skip
    if shared := ours & theirs:
        raise ValueError(
            f"{len(shared)} times {SHARED_WORDS} words in a row, first {' '.join(min(shared))!r}, judge too"
        )


def own_text() -> str:
    """Long docstrings of the standard library's modules, in order of their files' names."""
    return "\n\n".join(
        text
        for file in sorted(Path(os.__file__).parent.glob("*.py"))
        for text in _docstrings(file)
        if len(text) >= SHORTEST_DOCSTRING
    )


def _docstrings(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
            yield inspect.cleandoc(text)


def _own_prompts(split: str) -> list[Any]:
    records = read_records(sources.fetch(PROMPTS))
    return [r for r in records if split_of(str(r.values["prompt_id"]), HELDOUT_FRACTION) == split]


def _trace(name: str, prompt: list[int], answer: list[int]) -> dict[str, Any]:
    return {
        "trace_id": name, "prompt_id": name, "prompt": "", "prompt_token_ids": list(prompt),
        "response_token_ids": answer,
    }  # fmt: skip
