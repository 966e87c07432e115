"""Parameters of collect_traces."""

from __future__ import annotations

from dataclasses import dataclass, field

from reflux.components.declare import setting, source

STAGE_VERSION = "1"


@dataclass(frozen=True, kw_only=True)
class CollectTracesConfig:
    """Let the teacher answer every prompt and keep, for each token of its answer, what it would have said instead."""

    teacher: str = source()
    """Model folder, .gguf file, s3:// prefix, package:<module> or hub id of the teacher."""
    prompts_uri: str = source()
    """JSONL, CSV or Parquet file (or a folder of them) with prompt, and optionally prompt_id and dimension."""
    heldout_fraction: float = 0.2
    """Share of the prompts kept from training, in (0, 1); a prompt's side depends on a hash of its id alone."""
    trace_store: str = "topk"
    """Form in which distributions are stored: topk (k log-probabilities and the mass of the tail)."""
    top_k: int = 32
    """Log-probabilities kept per token, at most the vocabulary. 32 hold nearly all mass of a chat model."""
    temperature: float = 0.7
    """Temperature of sampling; 0 is greedy. Stored distributions are those at temperature 1 whatever this is."""
    top_p: float = 0.9
    """Nucleus of sampling in (0, 1]. Below 1, answers are not an unbiased sample of the stored distributions."""
    max_new_tokens: int = 256
    """Longest answer, tokens; a longer one is cut and marked with the stop reason length."""
    max_prompt_tokens: int = 1024
    """Longest prompt, tokens after the chat template; longer ones are rejected, never cut."""
    batch_size: int = 32
    """Prompts answered at once, and rows per shard. Part of the key: padding changes the last bits of the logits."""
    dtype: str = "float32"
    """float32 or bfloat16: precision in which the teacher runs."""
    seed: int = 0
    """Seed of all sampling; each prompt's draws come from this and its id."""
    key_token_strategies: list[str] = field(default_factory=lambda: ["confidence", "entropy"])
    """Views that make up the key-token score: confidence, entropy."""
    key_token_weights: list[float] = field(default_factory=lambda: [0.5, 0.5])
    """Weight of each strategy, >= 0."""
    key_token_temperature: float = 1.5
    """Divides the logits before confidence is read, > 0; above 1 because models are over-confident."""
    key_token_threshold: float = 0.7
    """Score in [0, 1] from which a token counts as key; stored with the traces."""
    device: str = setting("auto")
    """cpu, cuda or auto (cuda where there is one)."""

    def __post_init__(self) -> None:
        for name in ("teacher", "prompts_uri"):
            if not getattr(self, name):
                raise ValueError(f"collect_traces.{name}: is empty; name what the teacher is and what it is asked")
        if self.trace_store != "topk":
            raise ValueError(
                f"collect_traces.trace_store {self.trace_store!r}: allowed is topk; sampled is declared in the schemas "
                "but no stage fills it yet"
            )
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"collect_traces.dtype {self.dtype!r}: allowed are float32 and bfloat16")
        if self.device not in ("cpu", "cuda", "auto"):
            raise ValueError(f"collect_traces.device {self.device!r}: allowed are cpu, cuda and auto")
        for name in ("top_k", "max_new_tokens", "max_prompt_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"collect_traces.{name} {getattr(self, name)}: must be at least 1")
        if not 0 < self.heldout_fraction < 1:
            raise ValueError(f"collect_traces.heldout_fraction {self.heldout_fraction}: must lie between 0 and 1")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"collect_traces.top_p {self.top_p}: must be in (0, 1]")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"collect_traces.temperature {self.temperature}: must be 0 or positive")
        if not 0 < self.key_token_temperature < float("inf"):
            raise ValueError(f"collect_traces.key_token_temperature {self.key_token_temperature}: must be positive")
        if not 0 <= self.key_token_threshold <= 1:
            raise ValueError(f"collect_traces.key_token_threshold {self.key_token_threshold}: must be in [0, 1]")
