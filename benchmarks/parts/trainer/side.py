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
from torch._C._profiler import RecordScope, _ExperimentalConfig
from torch.autograd import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    _disable_profiler,
    _enable_profiler,
    _prepare_profiler,
)

MARK = "RESULT "
ROLLOUTS, MEASURED = "rollouts of the step", "the step that is measured"


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
    rss_bytes: int
    """The most that was resident during the step."""


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
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark of RSS begins anew
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
            rss_bytes=int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024,
        )


class Allocations:
    """Every allocation of torch from the making of this object until the end of the step that is measured.

    It has to see the models come, or it would not know how much memory goes when a weight is let go. Of the profiler
    only allocations and the marks set here are recorded, not operations, which would be gigabytes.
    """

    def __init__(self) -> None:
        config = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig())
        _prepare_profiler(config, {ProfilerActivity.CPU})
        _enable_profiler(config, {ProfilerActivity.CPU}, {RecordScope.USER_SCOPE})

    def begin(self) -> None:
        self.step = torch.profiler.record_function(MEASURED)
        self.step.__enter__()

    def end(self, model: torch.nn.Module) -> dict[str, float]:
        """Peaks of the step above what was there when it began: models and optimizer state. Gradients are part of the
        floor too, so their size is taken off.
        """
        self.step.__exit__(None, None, None)
        events = _disable_profiler().events()
        ((begin_ns, end_ns),) = _spans(events, MEASURED)
        rollouts = [span for span in _spans(events, ROLLOUTS) if span[0] >= begin_ns]
        now = base = scored_peak = rollout_peak = 0
        for at_ns, change in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
            now += change
            if at_ns < begin_ns:
                base = now
            elif any(begin <= at_ns <= end for begin, end in rollouts):
                rollout_peak = max(rollout_peak, now - base)
            elif at_ns <= end_ns:
                scored_peak = max(scored_peak, now - base)
        gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        return {
            "above_floor_mb": max(scored_peak - gradients, rollout_peak - gradients, 0) / 1e6,
            "rollout_peak_mb": rollout_peak / 1e6,
        }


def _spans(events: list[Any], name: str) -> list[tuple[int, int]]:
    return [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() == name]


def train_decoder_layers(model: Any) -> None:
    """What reflux trains: every decoder layer; embedding, final norm and head stay as they are."""
    model.requires_grad_(False)
    model.model.layers.requires_grad_(True)
