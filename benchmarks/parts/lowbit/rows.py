"""The rows of lowbit.py: how each model comes to be. Data alone, in the order of the table.

A scheme's fields are those of `Scheme`; what trained rows change of the demo's recipe is written as for `--config`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

OWN, CHAT, ENCYCLOPEDIA, IN_DOMAIN = "own", "chat", "encyclopedia", "in_domain"
"""Which text trains or calibrates: ours with or without its passages, other articles of Wikipedia than WikiText's, or
WikiText-2's validation text.
"""


@dataclass(frozen=True, kw_only=True)
class Rounded:
    """Rounded to nearest by reflux, nothing trained."""

    role: str
    scheme: dict[str, Any]
    base: str = ""
    """Another model than the one in full precision: what a peer's method makes of it."""
    equalized: bool = False
    """Whether its channels are equalised first."""

    @property
    def needs_table(self) -> bool:
        """Whether it rounds activations by a position table."""
        return self.scheme.get("activation_bits", 4) < 16 and self.scheme.get("activation") != "plain"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Quantised by llm-compressor to W4A16, as a checkpoint of compressed-tensors."""

    method: str
    """One of lowbit_peers.METHODS."""
    text: str = OWN


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The bundle of a run of our own stages."""

    text: str
    changes: dict[str, dict[str, Any]]
    """Stage -> field -> value, laid over RECIPE."""
    kernels: bool = False
    """On low-bit kernels, so that memory and latency are measured."""

    @property
    def role(self) -> str:
        return "deployed" if self.kernels else "distilled"


RECIPE: dict[str, dict[str, Any]] = {
    "collect_traces": {"heldout_fraction": 0.1},
    "profile_kv": {
        "profiled_traces": 24, "max_sequence_tokens": 512, "cost_traces": 0, "equalization_power": 0.0,
    },
    "distill": {
        "warmup_steps": 2, "joint_steps": 0, "finetune_student_lr": 2e-4, "batch_sequences": 2,
        "max_sequence_tokens": 512, "on_policy_fraction": 1.0, "rollout_temperature": 1.0, "rollout_top_p": 1.0,
        "weight_zero_points": True, "ema_decay": 0.95, "checkpoint_every": 20,
    },
    "calibrate": {"check_traces": 4},
    "evaluate": {
        "windows": 1, "window_tokens": 64, "heldout_traces": 1, "generations": 0, "latency_tokens": 20,
        "min_gap_closed_heldout": 0.0, "min_gap_closed_text": 0.0, "max_perplexity_ratio": 0.0, "min_pmr": 0.0,
    },
}  # fmt: skip
"""Over the demo's: longer sequences, whose prompts are scored too, since they are text. Its own evaluation is cut to
nothing, since this benchmark judges.
"""

BY_LAYER = {"objective": "forward_kl + bridge", "trace_objective": "forward_kl + bridge", "bridge_fraction": 1.0}
"""The hidden states of all layers and tokens too: the best mean of an ablation on our own prompts, within its noise."""
OF_ANSWERS: dict[str, dict[str, Any]] = {
    "collect_traces": {"max_new_tokens": 64},
    "distill": {
        "batch_sequences": 4, "finetune_steps": 58, "on_policy_fraction": 0.75, "rollout_new_tokens": 64, **BY_LAYER,
    },
}  # fmt: skip
"""Of docstrings, questions and what is answered to them."""
OF_TEXT: dict[str, dict[str, Any]] = {
    "collect_traces": {"max_new_tokens": 8},
    "profile_kv": {"equalization_power": 0.5},
    "distill": {"finetune_steps": 118, "finetune_student_lr": 1e-4, "rollout_new_tokens": 16},
}
"""Of prose alone, with equalised channels: these begin so near that half the rate does better on the training text."""
HALF_TERNARY: dict[str, dict[str, Any]] = {
    "collect_traces": {"max_new_tokens": 64, "temperature": 1.0, "top_p": 1.0},
    "profile_kv": {"activation_bits": 8},
    "distill": {
        "exceptions": ["layers.*[02468].*_proj=ternary"], "activation_bits": 8,
        "weight_zero_points": False, "batch_sequences": 8, "finetune_steps": 38, "score_prompts": False,
        "rollout_new_tokens": 64,
    },
}  # fmt: skip


def _with(changes: dict[str, dict[str, Any]], **distill: Any) -> dict[str, dict[str, Any]]:
    return {**changes, "distill": {**changes["distill"], **distill}}


LONGER = _with(OF_TEXT, finetune_steps=158)
"""Of as much prose as there are steps."""

ROWS: dict[str, Rounded | Peer | Trained] = {
    "fp32": Rounded(role="full", scheme={"weight_bits": 16, "activation_bits": 16}),
    "w4a16_rtn": Rounded(role="weights_only", scheme={"activation_bits": 16}),
    "w4a16_gptq": Peer(method="gptq"),
    "w4a16_gptq_zero_points": Peer(method="gptq_zero_points"),
    "w4a16_gptq_zero_points_of_encyclopedia": Peer(method="gptq_zero_points", text=ENCYCLOPEDIA),
    "w4a16_gptq_zero_points_in_domain": Peer(method="gptq_zero_points", text=IN_DOMAIN),
    "w4a16_awq": Peer(method="awq"),
    "w4a16_autoround": Peer(method="autoround"),
    "w4a16_autoround_of_encyclopedia": Peer(method="autoround", text=ENCYCLOPEDIA),
    "w4a4_plain": Rounded(role="plain", scheme={"activation": "plain"}),
    "w4a4_hadamard": Rounded(role="rotated", scheme={"activation": "plain", "rotation": "hadamard"}),
    "w4a4_smoothquant": Rounded(role="plain", scheme={"activation": "plain"}, base="smoothquant"),
    "w4a4_dual": Rounded(role="undistilled", scheme={}),
    "w4a4_dual_zero_points": Rounded(role="undistilled", scheme={"zero_points": True}),
    "w4a4_dual_zero_points_down8": Rounded(
        role="undistilled", scheme={"zero_points": True, "exceptions": ["down_in=8"]}
    ),
    "w4a4_dual_zero_points_embedding8": Rounded(role="undistilled", scheme={"zero_points": True, "embedding_bits": 8}),
    "w4a16_equalized": Rounded(
        role="weights_only", scheme={"activation_bits": 16, "zero_points": True}, equalized=True
    ),
    "w4a4_dual_equalized": Rounded(role="undistilled", scheme={"zero_points": True}, equalized=True),
    "w4a4_distilled": Trained(text=ENCYCLOPEDIA, changes=LONGER),
    "w4a4_distilled_of_answers": Trained(text=OWN, changes=OF_ANSWERS),
    "w4a4_distilled_in_domain": Trained(text=IN_DOMAIN, changes=OF_TEXT),
    "w4a4_deployed": Trained(text=ENCYCLOPEDIA, changes=LONGER, kernels=True),
    "w279a8_off_policy": Trained(text=CHAT, changes=_with(HALF_TERNARY, on_policy_fraction=0.0)),
    "w279a8_on_policy": Trained(text=CHAT, changes=HALF_TERNARY),
}
PROFILED = {False: "w4a4_distilled_of_answers", True: "w4a4_distilled"}
"""Whether a row is equalised -> the row whose run has the profile that untrained ones begin with."""

ORDER = (
    "fp32", "w4a16_gptq", "w4a4_distilled", "w4a4_distilled_in_domain", "w4a16_equalized", "w4a4_dual_equalized",
    "w4a16_gptq_zero_points", "w4a16_gptq_zero_points_of_encyclopedia",
    "w4a16_gptq_zero_points_in_domain", "w4a16_rtn", "w4a4_distilled_of_answers", "w4a4_dual",
    "w4a4_dual_zero_points", "w4a4_dual_zero_points_down8", "w4a4_dual_zero_points_embedding8", "w4a4_plain",
    "w4a4_hadamard", "w4a4_smoothquant", "w4a4_deployed", "w4a16_autoround", "w4a16_autoround_of_encyclopedia",
    "w4a16_awq", "w279a8_off_policy", "w279a8_on_policy",
)  # fmt: skip
"""In which they are made: what is asked for most comes first, should the time run out."""
