"""How fast a server is asked: so much per minute, spread evenly, whoever of this process asks."""

from __future__ import annotations

import threading
import time


class Pace:
    """A limit per minute; 0 is none. Its methods may be called from any thread."""

    def __init__(self, per_minute: float) -> None:
        self._each_s = 60 / per_minute if per_minute else 0.0
        self._free_s = 0.0  # by the monotonic clock: when the next may start
        self._lock = threading.Lock()

    def take(self, amount: float = 1.0) -> float:
        """Reserve `amount` after everything reserved before. Seconds to wait until it may start."""
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free_s)
            self._free_s = start + amount * self._each_s
            return start - now

    def give_back(self, amount: float) -> None:
        """What was reserved and not used: those who come later start earlier."""
        with self._lock:
            self._free_s -= amount * self._each_s
