"""The student as it is trained: a model under the configured quantiser, with adapters where these are asked for."""

from __future__ import annotations

from typing import Any

import torch

from reflux.components import processes
from reflux.components.algorithms.low_bit import Scheme, apply_scheme
from reflux.components.algorithms.policies import PositionTable
from reflux.components.algorithms.policy_networks import attach
from reflux.components.algorithms.recomputation import recompute_layers

from .adapters import add_adapters
from .config import DistillConfig
from .packed_start import PackedStart
from .start import Start


def device_of(config: DistillConfig) -> torch.device:
    """Of this process. ValueError if a GPU is asked for and there is none."""
    here = torch.cuda.is_available()
    if config.device == "cuda" and not here:
        raise ValueError("distill.device 'cuda': this process sees no GPU; take 'cpu' or 'auto'")
    return torch.device("cuda", processes.local_rank()) if here and config.device != "cpu" else torch.device("cpu")


def scheme_of(config: DistillConfig) -> Scheme:
    """The quantiser that the configuration describes. ValueError for exceptions that are none, or that the engine of
    the rollouts cannot take.
    """
    scheme = Scheme(
        weight_bits=config.weight_bits,
        group_size=config.group_size,
        zero_points=config.weight_zero_points,
        activation_bits=config.activation_bits,
        activation=config.activation,
        exceptions=tuple(config.exceptions),
        kv_cache=config.kv_cache,
        rope_bits=config.rope_bits,
        rotation=config.rotation,
        embedding_bits=config.embedding_bits,
    )
    if config.rollout_engine == "vllm" and scheme.quantizes_activations:
        raise ValueError(f"exceptions {config.exceptions}: vLLM, the rollout_engine, does not round activations")
    if config.rollout_engine == "vllm" and (
        scheme.weights_only() != scheme or scheme.rotates or scheme.rounds_embedding
    ):
        raise ValueError(
            f"kv_cache {scheme.kv_cache!r}, rope_bits {scheme.rope_bits}, rotation {scheme.rotation!r}, embedding_bits "
            f"{scheme.embedding_bits}: vLLM, the rollout_engine, rounds the decoder's weights alone and turns nothing; "
            "take 'local'"
        )
    return scheme


def make_student(
    config: DistillConfig, model: Any, policy: PositionTable | None, start: Start | PackedStart | None = None
) -> Any:
    """`model`, quantised in place; `policy` is the position table that its scheme may need, `start` has the weights of
    an earlier training, or codes to begin with.
    """
    apply_scheme(model, scheme_of(config), policy)
    if start is not None:
        start.load_into(model, base=type(model).__name__)
    if config.policy != "lookup":
        attach(model, config.policy, config.seed)
    if config.lora_rank:
        add_adapters(model, config)
    recompute_layers(model, config.activation_checkpointing)
    return model
