"""Two clocks for one purpose: how long the device worked between two marks."""

from __future__ import annotations

import time
from typing import Any

import torch


class HostClock:
    """The monotonic clock, for a device whose work is done when the call returns."""

    mark = staticmethod(time.perf_counter_ns)

    def wait(self) -> None:
        pass

    def durations_us(self, marks: list[tuple[int, int]]) -> list[float]:
        return [(end - begin) / 1000 for begin, end in marks]


class CudaClock:
    """Events in the current stream: the GPU's own time, however far ahead the host is."""

    def __init__(self) -> None:
        self.events: list[torch.cuda.Event] = []
        self.used = 0

    def mark(self) -> torch.cuda.Event:
        if self.used == len(self.events):  # kept from one decode to the next: making one costs more than recording it
            self.events.append(torch.cuda.Event(enable_timing=True))
        event = self.events[self.used]
        self.used += 1
        event.record()
        return event

    def wait(self) -> None:
        torch.cuda.synchronize()

    def durations_us(self, marks: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[float]:
        """The events of all marks so far are free again afterwards."""
        self.wait()
        self.used = 0
        return [1000 * begin.elapsed_time(end) for begin, end in marks]


def clock_for(device: torch.device) -> Any:
    return CudaClock() if device.type == "cuda" else HostClock()
