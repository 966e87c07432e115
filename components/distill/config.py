"""What distill trains, on what, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from reflux.components.declare import check_choices, choice, later, setting, source

from .objective_checks import OF_DRAWS, check_objectives
from .terms import OBJECTIVES, Term, parse

STAGE_VERSION = "8"


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """Train the student through its own low-bit forward, on its own rollouts and on the teacher's traces."""

    teacher: str = source()
    """The model that scores rollouts: folder, GGUF file, s3:// prefix or hub id."""
    student_uri: str = source()
    """The student before training, in full precision."""
    start_uri: str = source()
    """An earlier distill whose master weights and position table are begun with, of the same scheme: its folder in a
    store, objects/distill/KEY, or its files. "" begins with student_uri's weights and the profile's table.
    """

    objective: str = "beta_jsd"
    """Per token, a name or a weighted sum ("0.9*beta_jsd + 0.1*cross_entropy"): beta_jsd, forward_kl, reverse_kl,
    skew_forward_kl, skew_reverse_kl, cross_entropy, bridge, range_alignment; on rollouts also sampled_reverse_kl,
    sharpening and verifier, on traces next_token.
    """
    trace_objective: str = ""
    """The one on traces; "" is the same as on rollouts."""
    beta: float = 0.0
    """Of beta_jsd, in [0, 1]: 0 is the forward KL, 1 the reverse. 0 recovers quantisation loss fastest."""
    skew: float = 0.1
    """Of the skew KLs, in [0, 1): share of the first distribution in the second. The published value."""
    bridge_fraction: float = later(0.2)
    """Of bridge, in (0, 1]: share of a sequence's places (layer, token), those where the layer's output is furthest
    from the teacher's, on which the squared relative distance is minimised. The published value.
    """
    alignment_width: float = later(14.0)
    """Of range_alignment, nats: a logit further below its token's largest one is as good as this far below."""
    discount: float = 0.0
    """Of sampled_reverse_kl, in [0, 1]: how much the advantages of later tokens count for a token."""
    off_distribution: str = choice("refuse", ("refuse", "renormalise"))
    """What sampled_reverse_kl and verifier do with rollouts at another temperature or top_p than 1: refuse, or
    renormalise, which takes the ratio and its gradient of the distribution that was drawn from.
    """
    sharpen_alpha: float = 2.0
    """Of sharpening: the exponent of the teacher's probability of a whole answer."""
    sharpen_temperature: float = 0.0
    """At which its particles are drawn, instead of rollout_temperature; 0 is the published 1 / sharpen_alpha."""
    sharpen_particles: int = 16
    """Answers to one prompt that are weighed against each other; must divide rollout_batch."""
    sharpen_block_tokens: int = 64
    """Tokens between two looks at the weights."""
    verified_task: str = later("addition")
    """Of verifier: the task of distill/verified_tasks.py that its rollouts answer, instead of the traces' prompts."""
    verified_problems: int = later(64)
    """Different problems of that task."""
    group_answers: int = later(4)
    """Of verifier: answers to one problem that are compared with each other; must divide rollout_batch."""
    on_policy_fraction: float = 0.5
    """Lambda: share of the sequences that are the student's own rollouts, scored by the teacher; the rest are traces.
    """

    trace_k: int = 0
    """Log-probabilities (or draws) per token that the traces must have been collected with; 0 takes what is there."""

    weight_bits: int = 4
    """Bits of every decoder weight, 2 to 8; 16 leaves weights alone."""
    group_size: int = 64
    """Input channels that share a weight scale; must divide every layer's width."""
    weight_zero_points: bool = later(False)
    """Whether a group also has a zero point, of as many bits as a weight: its grid spans the smallest to the largest
    weight instead of being symmetric.
    """
    activation_bits: int = 4
    """Bits of the activations that enter those layers, 2 to 8; 16 leaves them alone."""
    activation: str = choice("dual", ("dual", "plain"))
    """plain: one scale per token; dual: a main scale from the position table and an outlier scale from the token."""

    exceptions: list[str] = field(default_factory=list)
    """Layers of other bits, PATTERN=BITS (2 to 8, 16, or ternary for weights): down_proj=8 for weights, down_in=8 for
    what enters (the sites attn_in, o_in, mlp_in, down_in), layers.0.*=8 for both in a layer. The last one that fits
    counts.
    """
    kv_cache: str = later("full", ("full", "int8", "int4", "kivi4", "kivi2"))
    """Form of cached keys and values, which training sees too: full precision; int8 or int4 with a scale for each token
    and head; KIVI's grids of 4 or 2 bits, keys by channel and values by token, the newest tokens in full precision.
    """
    rope_bits: int = later(16)
    """Bits of the rotary tables: 8, or 16 for tables that are not rounded."""
    rotation: str = later("none", ("none", "hadamard"))
    """hadamard: the student is turned before its weights are rounded, so that outliers spread; activation is plain."""
    embedding_bits: int = later(16)
    """Bits of embedding and lm_head: 8, one scale for each token of the vocabulary, or 16 for not rounded."""

    policy: str = later("lookup", ("lookup", "mlp", "attention"))
    """Who says what an activation's main scale is: lookup, the position table; mlp or attention, in the warm-up also a
    network that reads the block before, the mean over the tokens so far or those it attends to. It becomes part of the
    table when the warm-up ends.
    """
    policy_network_lr: float = later(1e-3)
    """Rate of that network; the table beside it has warmup_policy_lr."""
    k_norm_power: float = later(0.0)
    """Around attention the table begins with main scales times (norm of K there / its median)^-k_norm_power, a quarter
    at least and never more than they were; 0 leaves them.
    """

    warmup_steps: int = 100
    """Steps in which only the policy moves: the position table, and a network beside it."""
    warmup_patience: int = later(0)
    """These steps end early once the activation KL, averaged over so many of them, is no lower than over as many
    before; 0: not before their number.
    """
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
    joint_gradient_clip: float = later(0.0)
    """gradient_clip there; 0: no other than elsewhere."""
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
    warmup_teacher_weight: float = later(1.0)
    """Share of the teacher in what is minimised on traces in the warm-up, in [0, 1]; the rest is next_token. On
    rollouts nobody but the teacher says what is right.
    """
    joint_teacher_weight: float = later(1.0)
    """The same at the first joint step."""
    joint_teacher_weight_end: float = later(1.0)
    """The same at the last; linear in between."""
    finetune_teacher_weight: float = later(1.0)
    """The same in the fine-tuning."""
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
    packing: bool = False
    """Lay the sequences of a forward end to end in rows of at most max_sequence_tokens, instead of padding each."""
    max_sequence_tokens: int = 256
    """Prompt and answer together; longer sequences are cut and counted."""
    compute_dtype: str = choice("float32", ("float32", "bfloat16", "auto"))
    """float32, bfloat16, or auto: bfloat16 where CPU or GPU multiply it natively. Of the passes through the layers that
    are scored; master weights, logits, losses, rollouts and what is exported stay float32.
    """
    activation_checkpointing: str = setting("selective", ("none", "selective", "full"))
    """What a layer computes again in the backward pass instead of keeping it: nothing; all but products and attention,
    half the memory for a twentieth more work; or the whole layer, the memory of one layer for a third more work.
    """
    parallelism: str = choice("ddp", ("ddp", "fsdp2"))
    """Between torchrun's processes: ddp, each holds the whole student; fsdp2, each a share of every layer. With one
    process they are the same.
    """
    lora_rank: int = 0
    """Rank of the adapters that are trained instead of the decoder's weights; 0 trains the weights."""
    lora_alpha: float = 16.0
    """Of the adapters: they are scaled by lora_alpha / lora_rank, or / sqrt(lora_rank) if lora_rank_stabilised."""
    lora_rank_stabilised: bool = False
    """rsLoRA (arXiv 2312.03732), for high ranks."""
    lora_targets: list[str] = field(default_factory=list)
    """Linear layers that get one, e.g. q_proj, v_proj; none named is all of the decoder's."""
    weight_decay: float = 0.01
    """Of AdamW, on weights but not on the table."""
    gradient_clip: float = 1.0
    """Largest norm of the gradient of all trained parameters."""
    ema_decay: float = 0.999
    """Of the average of the trained parameters; 0 keeps none."""
    export: str = choice("ema", ("ema", "last", "best"))
    """Which weights become the student: ema or last, which are both validated and reported by name, or best: of the
    average (of the last ones without an ema_decay) as it stood when validation was best.
    """
    validate_every: int = 0
    """Optimizer steps between validations while training; 0: only before and after."""
    patience: int = 0
    """Validations in a row without a better one that end the training early; 0 never."""
    hard_weight: int = 2
    """How often an expert-marked hard sample is dealt for each time another one is."""
    validation_traces: int = 8
    """Training traces kept back to validate on; held-out traces are evaluate's alone."""

    rollout_batch: int = 32
    """Rollouts made at once, by the student as it stands; new ones when they are used up."""
    rollout_new_tokens: int = 96
    """Longest rollout, tokens."""
    rollout_engine: str = choice("local", ("local", "vllm"))
    """local: the student's own forward; vllm: a vLLM on the same GPU, for a student that does not round activations."""
    rollout_slots: int = 0
    """Rollouts under way at once in an engine; a finished one's place is taken by the next. 0: all of rollout_batch."""
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
    generations_every: int = setting(0)
    """Optimizer steps between tables of the student's answers, for people to read; 0 writes none."""
    generation_prompts: int = setting(4)
    """Prompts of the validation traces that it answers there, greedily."""
    device: str = setting("auto", ("cpu", "cuda", "auto"))
    """Where it trains: cpu, cuda (each process on the GPU of its local rank), or auto: cuda where there is one."""
    memory_gib: float = setting(0.0)
    """Memory that this process may take, GiB; 0 takes what machine or GPU have free. A run that needs more is refused.
    """

    def __post_init__(self) -> None:
        check_choices(self)
        _check_ranges(self)
        _check_quantiser(self)
        _check_lengths(self)
        _check_policy(self)
        _check_export(self)
        check_objectives(self)
        if self.warmup_steps + self.joint_steps + self.finetune_steps < 1:
            raise ValueError("distill.warmup_steps, joint_steps, finetune_steps: at least one step in all is needed")

    @property
    def rollout_terms(self) -> tuple[Term, ...]:
        """What is minimised on rollouts."""
        return parse("objective", self.objective)

    @property
    def trace_terms(self) -> tuple[Term, ...]:
        """What is minimised on traces, and validated with."""
        return parse("trace_objective", self.trace_objective) if self.trace_objective else self.rollout_terms

    def parameter(self, term: Term) -> float:
        """The term's own one; 0 where it has none."""
        name = OBJECTIVES[term.name].parameter
        return getattr(self, name) if name else 0.0

    def minimises(self, name: str) -> bool:
        """Whether rollouts are trained on with the objective of that name."""
        return self.on_policy_fraction > 0 and any(term.name == name for term in self.rollout_terms)

    @property
    def needs_draws(self) -> bool:
        """Whether rollouts come with the probability that each token was drawn with."""
        return any(self.minimises(name) for name in OF_DRAWS)

    @property
    def compares_layers(self) -> bool:
        """Whether the training depends on a teacher with the student's layers."""
        on_traces = self.on_policy_fraction < 1 and any(term.name == "bridge" for term in self.trace_terms)
        return self.warmup_patience > 0 or self.minimises("bridge") or on_traces


RANGES: dict[str, Callable[[float], bool]] = {
    "must be positive": lambda value: value > 0,
    "must not be negative": lambda value: value >= 0,
    "must be in [0, 1]": lambda value: 0 <= value <= 1,
    "must be in [0, 1)": lambda value: 0 <= value < 1,
    "must be in (0, 1]": lambda value: 0 < value <= 1,
}
RANGE_OF = {
    "must be positive": (
        "group_size", "batch_sequences", "micro_batch_sequences", "max_sequence_tokens", "gradient_clip",
        "hard_weight", "rollout_batch", "rollout_new_tokens", "checkpoint_every", "joint_policy_every",
        "finetune_policy_every", "sharpen_alpha", "sharpen_particles", "sharpen_block_tokens", "lora_alpha",
        "alignment_width", "verified_problems",
        "generation_prompts",
    ),
    "must not be negative": (
        "warmup_steps", "joint_steps", "finetune_steps", "max_steps", "rise_steps", "joint_last_layers", "trace_k",
        "warmup_patience", "joint_gradient_clip",
        "warmup_policy_lr", "joint_policy_lr", "joint_student_lr", "finetune_policy_lr", "finetune_student_lr",
        "policy_network_lr", "k_norm_power",
        "weight_clip_lr", "weight_decay", "validation_traces", "rollout_slots", "sharpen_temperature",
        "rollout_temperature", "lora_rank", "validate_every", "patience", "generations_every", "memory_gib",
    ),
    "must be in [0, 1]": (
        "beta", "on_policy_fraction", "discount", "warmup_teacher_weight", "joint_teacher_weight",
        "joint_teacher_weight_end", "finetune_teacher_weight",
    ),
    "must be in [0, 1)": ("ema_decay", "skew"),
    "must be in (0, 1]": ("final_rate", "rollout_top_p", "bridge_fraction"),
}  # fmt: skip
"""Range -> the fields that are held to it; NaN is in none."""


def _check_ranges(config: DistillConfig) -> None:
    for meaning, names in RANGE_OF.items():
        for name in names:
            if not RANGES[meaning](value := getattr(config, name)):
                raise ValueError(f"distill.{name} {value}: {meaning}")


def _check_quantiser(config: DistillConfig) -> None:
    for name in ("weight_bits", "activation_bits"):
        if (value := getattr(config, name)) not in (*range(2, 9), 16):
            raise ValueError(f"distill.{name} {value}: allowed are 2 to 8, or 16 for not quantised")
    if config.lora_rank and config.weight_bits == 16:
        raise ValueError(
            f"distill.lora_rank {config.lora_rank}: adapters are merged into the weights before these are rounded, and "
            "weight_bits is 16; take fewer bits, or 0"
        )
    if config.lora_targets and not config.lora_rank:
        raise ValueError(
            f"distill.lora_targets {config.lora_targets}: adapters need a lora_rank above 0; at 0 weights are trained"
        )
    if config.lora_rank_stabilised and not config.lora_rank:
        raise ValueError(
            "distill.lora_rank_stabilised True: adapters need a lora_rank above 0; at 0 weights are trained"
        )
    rounded = config.weight_bits < 16 or any(not text.endswith("=16") for text in config.exceptions)
    if config.weight_clip_lr and not rounded:
        raise ValueError(
            f"distill.weight_clip_lr {config.weight_clip_lr}: at 16 weight_bits no weight has a grid whose end could "
            "be learned; set it to 0, or take fewer bits"
        )
    if config.rollout_engine == "vllm" and config.activation_bits < 16:
        raise ValueError(
            f"distill.rollout_engine 'vllm': vLLM does not round activations, and activation_bits is "
            f"{config.activation_bits}; take 'local', or 16 bits"
        )


def _check_lengths(config: DistillConfig) -> None:
    """A rollout has a prompt before it, whose every token would cut one off the rollout."""
    if config.on_policy_fraction > 0 and config.rollout_new_tokens >= config.max_sequence_tokens:
        raise ValueError(
            f"distill.rollout_new_tokens {config.rollout_new_tokens}: must be below max_sequence_tokens, "
            f"{config.max_sequence_tokens}, which prompt and rollout have together"
        )


def _check_policy(config: DistillConfig) -> None:
    if config.k_norm_power and config.start_uri:
        raise ValueError(
            f"distill.k_norm_power {config.k_norm_power}: changes the profile's table, and start_uri has one that was "
            "learned; leave one of the two out"
        )
    if config.policy == "lookup":
        return
    if not config.warmup_steps:
        raise ValueError(f"distill.policy {config.policy!r}: is trained in the warm-up, and warmup_steps is 0")
    if config.export == "best":
        raise ValueError(
            f"distill.policy {config.policy!r}: the best weights may be those of the warm-up, whose network is gone by "
            "the end; export ema or last"
        )


def _check_export(config: DistillConfig) -> None:
    if config.export == "ema" and not config.ema_decay:
        raise ValueError("distill.export 'ema': needs an ema_decay above 0")
    if config.validate_every and not config.validation_traces:
        raise ValueError(f"distill.validate_every {config.validate_every}: needs validation_traces above 0")
    for name, needed in {"export": config.export == "best", "patience": config.patience > 0}.items():
        if needed and not config.validate_every:
            raise ValueError(
                f"distill.{name} {getattr(config, name)!r}: needs validate_every and validation_traces above 0"
            )
