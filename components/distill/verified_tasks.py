"""Tasks of our own whose answers an exact rule judges: what a verifier's advantage is taken from.

A task has to be one that the student solves now and then: a group of answers that are all right, or all wrong, says
nothing. SmolLM2-135M-Instruct solves about 1 % of GSM8K's problems, and of these 20 to 80 % (LOG.md). Needs only the
standard library, as the configuration that names a task does.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One prompt and the rule's verdict on an answer to it."""

    name: str
    prompt: str
    right: Callable[[str], bool]


def addition(random_: random.Random) -> tuple[str, Callable[[str], bool]]:
    """Two numbers of one digit. Right if the last number in the answer is their sum."""
    a, b = random_.randint(1, 9), random_.randint(1, 9)
    return f"What is {a} + {b}?", lambda answer: _numbers(answer)[-1:] == [a + b]


def parity(random_: random.Random) -> tuple[str, Callable[[str], bool]]:
    """A number of up to three digits, and a format: right if the answer begins with the right word, Yes or No."""
    a = random_.randint(10, 999)
    wanted = "no" if a % 2 else "yes"
    return f"Is {a} an even number? Answer Yes or No.", lambda answer: _words(answer)[:1] == [wanted]


TASKS: dict[str, Callable[[random.Random], tuple[str, Callable[[str], bool]]]] = {
    "addition": addition,
    "parity": parity,
}


def problems(task: str, seed: int, count: int) -> list[Problem]:
    """`count` different problems, always the same ones for a seed. ValueError for an unknown task, or one that does not
    have so many.
    """
    if task not in TASKS:
        raise ValueError(f"verified_task {task!r}: allowed are {', '.join(TASKS)}")
    random_, found = random.Random(f"{task} {seed}"), dict[str, Callable[[str], bool]]()
    for _ in range(100 * count):
        if len(found) == count:
            break
        prompt, right = TASKS[task](random_)
        found.setdefault(prompt, right)
    if len(found) < count:
        raise ValueError(f"verified_problems {count}: the task {task} has fewer, about {len(found)}")
    return [
        Problem(name=f"{task}-{number}", prompt=prompt, right=right)
        for number, (prompt, right) in enumerate(found.items())
    ]


def _numbers(answer: str) -> list[int]:
    return [int(number) for number in re.findall(r"-?\d+", answer)]


def _words(answer: str) -> list[str]:
    return re.findall(r"[a-z]+", answer.lower())
