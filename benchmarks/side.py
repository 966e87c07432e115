"""One side of the comparison of trainers, in a process and perhaps an environment of its own: needs nothing of reflux.

The parent writes one command a line, the side answers each with one line that begins with RESULT. A step's peak of
memory is summed up from torch's own record of every allocation, so it is exact and the same for both sides; RSS, which
also holds libraries and what malloc keeps, stands beside it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

MARK = "RESULT "
ROLLOUTS = "rollouts of the step"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What both sides do alike."""

    student: str
    teacher: str
    """Folders in Hugging Face layout, the tokenizer in the student's."""
    prompts: list[list[int]]
    """In the order in which they are answered, over and over."""
    texts: list[str]
    """The same before tokenization; `chat` says whether the chat template comes between."""
    chat: bool
    eos_token: str
    new_tokens: int
    batch: int
    threads: int
    beta: float
    learning_rate: float
    settings: dict[str, Any]
    """Of this side alone."""

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)))


def read_spec() -> Spec:
    return Spec(**json.loads(Path(sys.argv[1]).read_text()))


@dataclass(frozen=True, kw_only=True)
class Step:
    completion_tokens: int
    rollout_s: float
    scored_s: float
    cpu_s: float
    """Of all threads, which other work on the machine hardly touches."""


def commands() -> Iterator[dict[str, Any]]:
    answer({"ready": True, "torch": torch.__version__})
    for line in sys.stdin:
        yield json.loads(line)


def answer(result: dict[str, Any]) -> None:
    print(f"\n{MARK}{json.dumps(result)}", flush=True)


class Stopwatch:
    """Time and lengths of the rollouts within a step."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.rollout_s, self.tokens, self.begin, self.cpu = 0.0, 0, time.perf_counter(), time.process_time()

    def rollouts(self, make: Callable[[], Any], lengths: Callable[[Any], list[int]]) -> Any:
        begin = time.perf_counter()
        with torch.profiler.record_function(ROLLOUTS):
            made = make()
        self.rollout_s += time.perf_counter() - begin
        self.tokens += sum(lengths(made))
        return made

    def stop(self) -> Step:
        whole_s = time.perf_counter() - self.begin
        return Step(
            completion_tokens=self.tokens,
            rollout_s=self.rollout_s,
            scored_s=whole_s - self.rollout_s,
            cpu_s=time.process_time() - self.cpu,
        )


class Allocations:
    """Between enter and exit: the peak of what torch allocated beyond what was there before, and of RSS."""

    def __init__(self) -> None:
        self.profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )

    def __enter__(self) -> Allocations:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark of RSS begins anew
        self.profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.rss_bytes = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
        self.profile.__exit__(None, None, None)
        events = self.profile.profiler.kineto_results.events()
        allocated = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        spans = [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() == ROLLOUTS]
        now = self.peak_bytes = self.rollout_peak_bytes = 0
        for at_ns, change in allocated:
            now += change
            if any(begin <= at_ns <= end for begin, end in spans):
                self.rollout_peak_bytes = max(self.rollout_peak_bytes, now)
            else:
                self.peak_bytes = max(self.peak_bytes, now)


def memory_of(model: torch.nn.Module, allocations: Allocations) -> dict[str, float]:
    """Of one step, MB; gradients are part of the floor, and of the peak of the scored part only."""
    gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    above = max(allocations.peak_bytes - gradients, allocations.rollout_peak_bytes - gradients, 0)
    return {
        "above_floor_mb": above / 1e6,
        "scored_peak_mb": (allocations.peak_bytes - gradients) / 1e6,
        "rollout_peak_mb": allocations.rollout_peak_bytes / 1e6,
        "rss_mb": allocations.rss_bytes / 1e6,
    }


def train_decoder_layers(model: Any) -> None:
    """What reflux trains: every decoder layer; embedding, final norm and head stay as they are."""
    model.requires_grad_(False)
    model.model.layers.requires_grad_(True)
