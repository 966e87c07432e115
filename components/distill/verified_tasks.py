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

WORDS = ("apple", "bridge", "candle", "door", "engine", "forest", "garden", "hammer", "island", "jacket", "kettle",
         "ladder", "mirror", "needle", "orange", "pencil", "river", "spoon", "table", "window")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One prompt and the rule's verdict on an answer to it."""

    name: str
    prompt: str
    right: Callable[[str], bool]


def addition(random_: random.Random) -> tuple[str, Callable[[str], bool]]:
    """Two numbers of one or two digits. Right if the last number in the answer is their sum."""
    a, b = random_.randint(2, 49), random_.randint(2, 49)
    return f"What is {a} + {b}? Answer with the number only.", lambda answer: _last_number(answer) == a + b


def repetition(random_: random.Random) -> tuple[str, Callable[[str], bool]]:
    """A format: one word several times. Right if the answer is just that, but for a final full stop."""
    word, times = random_.choice(WORDS), random_.randint(2, 5)
    wanted = ", ".join([word] * times)
    asked = f'Write the word "{word}" {times} times, separated by commas. Write nothing else.'
    return asked, lambda answer: answer.strip().removesuffix(".").lower() == wanted


TASKS: dict[str, Callable[[random.Random], tuple[str, Callable[[str], bool]]]] = {
    "addition": addition,
    "repetition": repetition,
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


def _last_number(answer: str) -> int | None:
    numbers = re.findall(r"-?\d+", answer.replace(",", ""))
    return int(numbers[-1]) if numbers else None
