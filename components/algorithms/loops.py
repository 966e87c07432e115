"""Whether an answer got stuck: the last thing that a model does before its budget ends it is to repeat itself."""

from __future__ import annotations

LONGEST_PERIOD = 16
REPEATS = 3


def ends_in_loop(token_ids: list[int]) -> bool:
    """Whether the last tokens are one phrase of at most LONGEST_PERIOD tokens, at least REPEATS times over."""
    for period in range(1, min(LONGEST_PERIOD, len(token_ids) // REPEATS) + 1):
        tail = token_ids[-period * REPEATS :]
        if tail == tail[:period] * REPEATS:
            return True
    return False
