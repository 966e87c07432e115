"""How much of the traces is profiled, and how the position table is chosen from it."""

from __future__ import annotations

from dataclasses import dataclass

from reflux.components.declare import source

STAGE_VERSION = "1"


@dataclass(frozen=True, kw_only=True)
class ProfileKvConfig:
    """Watch the model on its own traces: activations per layer and position, K norms, cost of the KV cache."""

    student_uri: str = source()
    """The model that will be quantised, in full precision: folder, GGUF file, s3:// prefix or hub id."""
    profiled_traces: int = 24
    """Training traces profiled, the first by trace_id."""
    max_sequence_tokens: int = 256
    """Prompt and answer together; what lies beyond is not profiled."""
    batch_traces: int = 4
    """Traces per forward; part of the key because another size rounds differently."""
    activation_bits: int = 4
    """Bits that the main scale is chosen for, 2 to 8."""
    sample_tokens: int = 64
    """Tokens per site and position bucket on which candidate scales are tried; the whole bucket if smaller."""
    cost_traces: int = 4
    """Traces decoded token by token to time the cache."""
    cost_tokens: int = 64
    """Tokens decoded in each."""
    seed: int = 0
    """Of the samples."""

    def __post_init__(self) -> None:
        for name in ("profiled_traces", "max_sequence_tokens", "batch_traces", "sample_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"profile_kv.{name} {getattr(self, name)}: must be at least 1")
        for name in ("cost_traces", "cost_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"profile_kv.{name} {getattr(self, name)}: must not be negative")
        if not 2 <= self.activation_bits <= 8:
            raise ValueError(f"profile_kv.activation_bits {self.activation_bits}: must be 2 to 8")
