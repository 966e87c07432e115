"""The answers that labels can refer to, and the proof that a label was given to the answer that is there now.

A trace_id says which question was put to which teacher in which way, so it changes when prompts are collected again
in another way, and a label must follow its answer, not its prompt. The rule: a label of a trace that is gone belongs to
an answer to the same prompt that reads the same from its beginning to the end of what was rated. What an expert says
about a step depends on the steps before it, never on those behind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from reflux.components.records import shown


@dataclass(frozen=True, kw_only=True)
class KnownTrace:
    trace_id: str
    prompt_id: str
    steps: int
    response: str | None = None
    """None where the answer is still to be given."""
    step_texts: list[str] | None = None
    token_ends: list[int] | None = None
    """[T] characters of the response up to the end of each token."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """Which trace a label belongs to, and what shows it."""

    trace: KnownTrace
    matched_by: str
    """trace_id, text or prompt_id"""
    carried_from: str | None = None
    """The trace_id that was rated, where that is another."""


class Traces:
    """Rows of the table `traces` by trace and by prompt.

    A row has trace_id, prompt_id and step_starts, and where the answer is known, response and response_char_ends.
    `foreseen`: answers are still to be given; step_starts holds as many as there can be.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]], *, foreseen: bool = False) -> None:
        self.foreseen = foreseen
        self._by_id: dict[str, KnownTrace] = {}
        self._by_prompt: dict[str, list[KnownTrace]] = defaultdict(list)
        for row in rows:
            trace = _known(row)
            self._by_id[trace.trace_id] = trace
            self._by_prompt[trace.prompt_id].append(trace)

    def find(self, trace_id: str, prompt_id: str, *, rated: Rated) -> Match:
        """ValueError if nothing shows which of the answers here was rated."""
        if not trace_id and not prompt_id:
            raise ValueError("trace_id, prompt_id: one of them must say what was rated")
        if trace := self._by_id.get(trace_id):
            if prompt_id and trace.prompt_id != prompt_id:
                raise ValueError(
                    f"prompt_id {shown(prompt_id)}: the trace named beside it belongs to {trace.prompt_id!r}"
                )
            rated.require_same(trace)
            return Match(trace=trace, matched_by="trace_id")
        if trace_id and not (prompt_id and rated.shows_all):
            raise ValueError(f"trace_id {shown(trace_id)}: unknown among {len(self._by_id)} traces")
        answers = self._by_prompt.get(prompt_id, [])
        if not answers:
            raise ValueError(f"prompt_id {shown(prompt_id)}: unknown among the prompts of {len(self._by_id)} traces")
        if rated.shows_all and not self.foreseen:
            answers = [trace for trace in answers if rated.same(trace)]
            if not answers:
                raise ValueError(
                    f"prompt_id {shown(prompt_id)}: no answer to it reads, up to what was rated, as it did then"
                )
        if len(answers) > 1:
            raise ValueError(f"prompt_id {shown(prompt_id)}: {len(answers)} answers could be meant; name the trace_id")
        rated.require_same(answers[0])
        return Match(
            trace=answers[0],
            matched_by="text" if rated.shows_all else "prompt_id",
            carried_from=trace_id or None,
        )

    def __len__(self) -> int:
        return len(self._by_id)


@dataclass(frozen=True, kw_only=True)
class Rated:
    """What the annotator saw, as far as the label says."""

    step: int | None = None
    step_text: str = ""
    steps: list[str] | None = None
    """Texts of the answer's steps, at least up to `step`."""
    response: str | None = None
    """The whole answer, of which the first `end` characters count."""
    end: int = 0

    @property
    def shows_all(self) -> bool:
        """Whether it says how the answer read from its beginning to the end of what was rated."""
        if self.step is None:
            return self.response is not None
        return self.steps is not None and len(self.steps) > self.step >= 0

    def same(self, trace: KnownTrace) -> bool:
        try:
            self.require_same(trace)
        except ValueError:
            return False
        return True

    def require_same(self, trace: KnownTrace) -> None:
        """ValueError if the answer reads otherwise now; where it is unknown or nothing was shown, nothing is said."""
        if trace.response is None or trace.step_texts is None:
            return
        if self.step is None:
            if self.response is not None and trace.response[: self.end] != self.response[: self.end]:
                raise ValueError("response: the answer reads otherwise now, up to the end of what was marked")
            return
        if self.step < 0:
            return
        texts = self.steps[: self.step + 1] if self.shows_all and self.steps else []
        now = trace.step_texts[: self.step + 1]
        differing = [i for i, text in enumerate(texts) if i >= len(now) or _plain(text) != _plain(now[i])]
        if not differing and self.step_text and [_plain(text) for text in now[self.step :]] != [_plain(self.step_text)]:
            differing = [self.step]
        if differing:
            reads = shown(now[differing[0]].strip()) if differing[0] < len(now) else "missing"
            raise ValueError(f"step {differing[0]}: reads otherwise now than when it was rated; now it is {reads}")


def _known(row: Mapping[str, Any]) -> KnownTrace:
    starts, response, ends = row["step_starts"], row.get("response"), row.get("response_char_ends")
    trace = KnownTrace(trace_id=row["trace_id"], prompt_id=row["prompt_id"], steps=len(starts))
    if response is None or ends is None:
        return trace
    return KnownTrace(**vars(trace) | {"response": response, "token_ends": ends, "step_texts": step_texts(row)})


def step_texts(row: Mapping[str, Any]) -> list[str]:
    """[S] the text of each step of a trace, which together are the response."""
    response, ends = row["response"], row["response_char_ends"]
    begins = [ends[start - 1] if start else 0 for start in row["step_starts"]]
    return [response[begin:end] for begin, end in pairwise([*begins, len(response)])]


def _plain(text: str) -> str:
    """Tools and spreadsheets change white space, people do not notice it."""
    return " ".join(text.split())
