"""How much of the traces is profiled, how the position table is chosen from it, and how compute power is weighed."""

from __future__ import annotations

from dataclasses import dataclass, field

from reflux.components.declare import check_choices, choice, later, source

STAGE_VERSION = "3"

POWER_PROFILES = ("general", "medical", "code", "edge")
DEVICES = ("cpu", "cuda")


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
    knots_per_doubling: int = later(1)
    """Rows of the position table for each doubling of the position. More follow scales more closely that fall with the
    position, and rest on fewer tokens each.
    """
    equalization_power: float = later(0.0)
    """Before it is profiled, and in distill before it is trained, each channel of the model's activations is divided by
    (its root mean square / norm of the weights that read it)^equalization_power, and these weights are multiplied by
    it: in full precision it computes what it did, in few bits more exactly. 0.5 has the least noise, 0 leaves it.
    """
    sample_tokens: int = 64
    """Tokens per site and position bucket on which candidate scales are tried; the whole bucket if smaller."""
    cost_traces: int = 4
    """Traces decoded token by token to time the cache. 0: nothing is timed, and no power distribution is made."""
    cost_tokens: int = 64
    """Tokens decoded in each."""
    cost_rounds: int = 3
    """Times that they are decoded, each once bare and once with the cache timed. Medians are over rounds."""
    cost_device: str = choice("cpu", DEVICES)
    """Where they are decoded. Everything else is computed on the CPU."""
    power_profile: str = choice("general", POWER_PROFILES)
    """What the field of use asks of compute power."""
    power_coefficients: list[float] = field(default_factory=list)
    """Alpha, beta and gamma of attention, FFN and cost, not negative, sum 1. Empty: the knee of the measured front,
    which is as little repeatable as the measurement."""
    power_attention_layers: list[int] = field(default_factory=list)
    """Layers whose largest attention weight counts, from 0. Empty: all."""
    power_first_token: int = 4
    """Position at which compute power begins: the first tokens of a sequence take norms a hundred times those of all
    later ones, beside which nothing else would show."""
    seed: int = 0
    """Of the samples."""

    def __post_init__(self) -> None:
        sizes = ("profiled_traces", "max_sequence_tokens", "batch_traces", "sample_tokens", "cost_rounds")
        for name in (*sizes, "knots_per_doubling"):
            if getattr(self, name) < 1:
                raise ValueError(f"profile_kv.{name} {getattr(self, name)}: must be at least 1")
        for name in ("cost_traces", "cost_tokens", "power_first_token"):
            if getattr(self, name) < 0:
                raise ValueError(f"profile_kv.{name} {getattr(self, name)}: must not be negative")
        if not 2 <= self.activation_bits <= 8:
            raise ValueError(f"profile_kv.activation_bits {self.activation_bits}: must be 2 to 8")
        if not 0 <= self.equalization_power <= 1:
            raise ValueError(f"profile_kv.equalization_power {self.equalization_power}: must be in [0, 1]")
        check_choices(self)
        given = self.power_coefficients
        if given and (len(given) != 3 or min(given) < 0 or abs(sum(given) - 1) > 1e-6):
            raise ValueError(f"profile_kv.power_coefficients {given}: must be three numbers, not negative, with sum 1")
        if any(layer < 0 for layer in self.power_attention_layers):
            raise ValueError(f"profile_kv.power_attention_layers {self.power_attention_layers}: must not be negative")
