"""What distill trains, on what, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from reflux.components.declare import setting, source

STAGE_VERSION = "2"

OBJECTIVES = ("beta_jsd", "forward_kl", "reverse_kl")
EXPORTS = ("ema", "last")
ACTIVATIONS = ("dual", "plain")
COMPUTE_DTYPES = ("float32", "bfloat16", "auto")


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """Train the student through its own low-bit forward, on its own rollouts and on the teacher's traces."""

    teacher: str = source()
    """The model that scores rollouts: folder, GGUF file, s3:// prefix or hub id."""
    student_uri: str = source()
    """The student before training, in full precision."""

    objective: str = "beta_jsd"
    """beta_jsd, forward_kl or reverse_kl, per token; the same one on rollouts and on traces."""
    beta: float = 0.0
    """Of beta_jsd, in [0, 1]: 0 is the forward KL, 1 the reverse. 0 recovers quantisation loss fastest."""
    on_policy_fraction: float = 0.5
    """Lambda: share of the sequences that are the student's own rollouts, scored by the teacher; the rest are traces.
    """

    trace_k: int = 0
    """Log-probabilities (or draws) per token that the traces must have been collected with; 0 takes what is there."""

    weight_bits: int = 4
    """Bits of every decoder weight, 2 to 8; 16 leaves weights alone."""
    group_size: int = 64
    """Input channels that share a weight scale; must divide every layer's width."""
    activation_bits: int = 4
    """Bits of the activations that enter those layers, 2 to 8; 16 leaves them alone."""
    activation: str = "dual"
    """plain: one scale per token; dual: a main scale from the position table and an outlier scale from the token."""

    warmup_steps: int = 100
    """Steps in which only the position table moves."""
    warmup_policy_lr: float = 1e-4
    """Rate of the table's log-scales there."""
    joint_steps: int = 500
    """Steps in which the table and the last layers move."""
    joint_policy_lr: float = 5e-5
    """Rate of the table there."""
    joint_student_lr: float = 1e-6
    """Rate of the weights there."""
    joint_last_layers: int = 2
    """Decoder layers trained there, counted from the last."""
    joint_policy_every: int = 2
    """The table moves every so many steps there."""
    finetune_steps: int = 200
    """Steps in which every decoder layer moves."""
    finetune_policy_lr: float = 5e-5
    """Rate of the table there."""
    finetune_student_lr: float = 5e-7
    """Rate of the weights there. The published value, for 7B parameters; 135M ones want a hundred times more."""
    finetune_policy_every: int = 4
    """The table moves every so many steps there."""
    weight_clip_lr: float = 0.0
    """Rate at which each weight group learns where its grid ends, in the steps that move its layer; 0: at its largest
    |w|. Of the logarithm, so 5e-3 moves an end by half a percent a step.
    """
    max_steps: int = 0
    """Cap on the optimizer steps of all phases together, shortened in proportion; 0 is no cap."""
    rise_steps: int = 2
    """Steps over which each phase's rate rises."""
    final_rate: float = 0.1
    """Share of a phase's rate that is left at its last step; in between it falls linearly."""

    batch_sequences: int = 8
    """Sequences per optimizer step, rollouts and traces together."""
    micro_batch_sequences: int = 4
    """Sequences per forward; the loss does not depend on it but for rounding."""
    max_sequence_tokens: int = 256
    """Prompt and answer together; longer sequences are cut and counted."""
    compute_dtype: str = "float32"
    """float32, bfloat16, or auto: bfloat16 where the CPU multiplies it natively. Of the passes through the layers that
    are scored; master weights, logits, losses, rollouts and what is exported stay float32.
    """
    weight_decay: float = 0.01
    """Of AdamW, on weights but not on the table."""
    gradient_clip: float = 1.0
    """Largest norm of the gradient of all trained parameters."""
    ema_decay: float = 0.999
    """Of the average of the trained parameters; 0 keeps none."""
    export: str = "ema"
    """Which weights become the student: ema or last. Both are validated and reported by name."""
    hard_weight: int = 2
    """How often an expert-marked hard sample is dealt for each time another one is."""
    validation_traces: int = 8
    """Training traces kept back to validate on; held-out traces are evaluate's alone."""

    rollout_batch: int = 32
    """Rollouts made at once, by the student as it stands; new ones when they are used up."""
    rollout_new_tokens: int = 96
    """Longest rollout, tokens."""
    rollout_temperature: float = 1.0
    """Temperature of the rollouts; the loss always compares distributions at temperature 1."""
    rollout_top_p: float = 1.0
    """Nucleus of the rollouts; below 1 they leave the student's own distribution, which beta_jsd does not mind."""
    score_prompts: bool = True
    """Also score the prompt's tokens of rollouts, which the teacher sees in the same forward."""

    seed: int = 0
    """Of everything drawn here."""
    checkpoint_every: int = setting(10)
    """Optimizer steps between checkpoints. A resumed run ends with the same bytes as one never killed."""

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_ranges(self)
        _check_quantiser(self)
        _check_export(self)
        if self.warmup_steps + self.joint_steps + self.finetune_steps < 1:
            raise ValueError("distill.warmup_steps, joint_steps, finetune_steps: at least one step in all is needed")


CHOICES = {
    "objective": OBJECTIVES,
    "activation": ACTIVATIONS,
    "compute_dtype": COMPUTE_DTYPES,
    "export": EXPORTS,
}
"""Field -> what it may be."""

RANGES: dict[str, Callable[[float], bool]] = {
    "must be positive": lambda value: value > 0,
    "must not be negative": lambda value: value >= 0,
    "must be in [0, 1]": lambda value: 0 <= value <= 1,
    "must be in [0, 1)": lambda value: 0 <= value < 1,
}
RANGE_OF = {
    "must be positive": (
        "group_size", "batch_sequences", "micro_batch_sequences", "max_sequence_tokens", "gradient_clip",
        "hard_weight", "rollout_batch", "rollout_new_tokens", "checkpoint_every", "joint_policy_every",
        "finetune_policy_every",
    ),
    "must not be negative": (
        "warmup_steps", "joint_steps", "finetune_steps", "max_steps", "rise_steps", "joint_last_layers", "trace_k",
        "warmup_policy_lr", "joint_policy_lr", "joint_student_lr", "finetune_policy_lr", "finetune_student_lr",
        "weight_clip_lr", "weight_decay", "validation_traces",
    ),
    "must be in [0, 1]": ("beta", "on_policy_fraction", "final_rate"),
    "must be in [0, 1)": ("ema_decay",),
}  # fmt: skip
"""Range -> the fields that are held to it; NaN is in none."""


def _check_choices(config: DistillConfig) -> None:
    for name, allowed in CHOICES.items():
        if (value := getattr(config, name)) not in allowed:
            raise ValueError(f"distill.{name} {value!r}: allowed are {', '.join(allowed)}")


def _check_ranges(config: DistillConfig) -> None:
    for meaning, names in RANGE_OF.items():
        for name in names:
            if not RANGES[meaning](value := getattr(config, name)):
                raise ValueError(f"distill.{name} {value}: {meaning}")


def _check_quantiser(config: DistillConfig) -> None:
    for name in ("weight_bits", "activation_bits"):
        if (value := getattr(config, name)) not in (*range(2, 9), 16):
            raise ValueError(f"distill.{name} {value}: allowed are 2 to 8, or 16 for not quantised")


def _check_export(config: DistillConfig) -> None:
    if config.export == "ema" and not config.ema_decay:
        raise ValueError("distill.export 'ema': needs an ema_decay above 0")
