"""What the evaluation measures, and the gate that its verdict is made of."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from reflux.components.declare import later, setting, source

_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,99}")  # what MLflow's registry and a store can both have as a name
STAGE_VERSION = "7"


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Compare the exported student with its full-precision base and untrained low-bit forms, all in one run."""

    teacher: str = source()
    """The model whose decisions count as right: a folder, GGUF file, s3:// prefix or hub id."""
    student_uri: str = source()
    """The student's base model, in full precision and before training; same forms as `teacher`."""
    eval_text_uri: str = source()
    """UTF-8 text for perplexity. "" takes the language reference that every CPython carries (pydoc_data.topics)."""

    windows: int = 8
    """Windows of the text, spread evenly over it. 8 keep a 135M model near two seconds a window on two cores."""
    window_tokens: int = 512
    """Tokens per window, at least 2; every token but the first is scored."""
    heldout_traces: int = 20
    """Held-out traces scored at most, the first by trace_id; 0 takes all. 20 cost about as much as the text."""
    batch_traces: int = 8
    """Traces per forward. Another size rounds differently in the last digits, so it is part of the result's key."""
    generations: int = 4
    """Held-out prompts answered by every model for the report; 0 shows none."""
    generation_tokens: int = 48
    """Longest answer, tokens."""
    latency_tokens: int = 100
    """Decoded tokens timed at batch 1 after 10 for warming up; 20 or more, so that a 95th percentile exists."""
    low_bit_kernels: bool = False
    """Whether the bundle has a second row, computed by low-bit kernels: its latency and memory are then measured. Takes
    a third longer, and is refused for a scheme that has no kernel."""
    rotated_baseline: bool = later(False)
    """Whether there is a row w4a4_hadamard: the untrained base, turned by a Hadamard matrix before it is rounded, with
    plain activations.
    """
    seed: int = 0
    """Of the bootstrap intervals; everything else is deterministic."""

    min_gap_closed_heldout: float = 0.4
    """Gate: share of the quantisation gap closed on held-out answers. 0 switches the gate off."""
    min_gap_closed_text: float = 0.3
    """Gate: the same on the evaluation text. 0 switches the gate off."""
    max_perplexity_ratio: float = 1.8
    """Gate: distilled perplexity over full-precision perplexity. 0 switches the gate off."""
    min_pmr: float = 0.8
    """Gate: policy match rate of the distilled student, up to 1; a 135M model has 0.78 at W4A4 before it is trained.
    0 switches the gate off."""

    registered_model: str = setting("")
    """Name in MLflow's registry under which a bundle that passes the gate becomes a version, and the candidate. "" is
    none."""

    def __post_init__(self) -> None:
        if self.registered_model and not _MODEL.fullmatch(self.registered_model):
            raise ValueError(
                f"evaluate.registered_model {self.registered_model!r}: letters, digits, ' ', '.', '_' and '-' are "
                "allowed, at most 100"
            )
        smallest = {
            "windows": 1,
            "window_tokens": 2,
            "heldout_traces": 0,
            "batch_traces": 1,
            "generations": 0,
            "generation_tokens": 1,
            "latency_tokens": 20,
        }
        for name, least in smallest.items():
            if getattr(self, name) < least:
                raise ValueError(f"evaluate.{name} {getattr(self, name)}: must be at least {least}")
        for name, most in {"min_gap_closed_heldout": 1.0, "min_gap_closed_text": 1.0, "min_pmr": 1.0}.items():
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"evaluate.{name} {getattr(self, name)}: must be in [0, {most:g}], 0 for off")
        if not (self.max_perplexity_ratio == 0 or 1 <= self.max_perplexity_ratio < math.inf):
            raise ValueError(
                f"evaluate.max_perplexity_ratio {self.max_perplexity_ratio}: must be at least 1, or 0 for off"
            )
