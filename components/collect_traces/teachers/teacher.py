"""What the stage knows of a teacher."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass

from reflux.components.collect_traces.answers import Answer
from reflux.components.collect_traces.prompts import Prompt

OF_VOCABULARY = "vocabulary"
OF_BUCKETS = "buckets"


@dataclass(frozen=True, kw_only=True)
class Teacher:
    teacher_id: str
    """Enters the trace id: equal ids mean equal distributions."""
    entropy_of: str
    """What `entropy_nats` is the entropy of: the vocabulary, or the K + 1 buckets where no more is known."""
    answers: Callable[[Iterable[Prompt]], Generator[Answer, None, None]]
    """Answers in the order of the prompts. It reads ahead by a bounded number of prompts and holds as many answers,
    so memory does not grow with their number."""
