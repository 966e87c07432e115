"""LoRA: low-rank adapters by peft, merged before rounding.

The low-bit forward is that of round(W + s B A): W stands still, and the gradient reaches A and B through the rounding,
which lets it pass. Added behind the rounded weight instead (round(W) x + s B A x), as QLoRA does, an adapter could not
be put on the grid without an error, and what is deployed would not be what was trained. Here W + s B A is the master
weight that is exported, and rounds to the very codes that were trained through.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from reflux.components.algorithms.low_bit import LowBitLinear, decoder_layers
from reflux.components.bundles import latent

from .config import DistillConfig

MARK = ".adapter."
"""In the name of every parameter of an adapter."""
_NAME = "student"


class Adapter(nn.Module):
    """peft's LoRA layer of one weight: its initialisation and scale, without its forward."""

    def __init__(self, lora: Any) -> None:
        super().__init__()
        self.A, self.B, self.scale = lora.lora_A[_NAME].weight, lora.lora_B[_NAME].weight, lora.scaling[_NAME]

    def delta(self) -> torch.Tensor:
        """[O, I] what the adapter adds to the weight."""
        return (self.B @ self.A) * self.scale


def add_adapters(student: Any, config: DistillConfig) -> None:
    """Give the targeted weights of a low-bit student an adapter each, which changes nothing yet: B is zero.

    ValueError if a target is no linear layer of the decoder.
    """
    from peft import LoraConfig  # takes a second, so only where it is asked for
    from peft.tuners.lora import Linear

    layers = decoder_layers(student)
    linears = {name: m for name, m in layers.named_modules() if isinstance(m, LowBitLinear)}
    kinds = {name.rpartition(".")[2] for name in linears}
    if unknown := set(config.lora_targets) - kinds:
        raise ValueError(
            f"distill.lora_targets {min(unknown)!r}: no linear layer of the student's decoder; it has "
            f"{', '.join(sorted(kinds))}"
        )
    asked = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, use_rslora=config.lora_rank_stabilised)
    state = torch.random.get_rng_state()
    torch.manual_seed(config.seed)
    for name, linear in linears.items():
        if not config.lora_targets or name.rpartition(".")[2] in config.lora_targets:
            columns, rows = linear.weight.shape[1], linear.weight.shape[0]
            linear.adapter = Adapter(Linear(nn.Linear(columns, rows, bias=False), _NAME, asked, r=config.lora_rank))
    torch.random.set_rng_state(state)


def latent_weights(student: Any) -> dict[str, torch.Tensor]:
    """Name -> master weight of everything in the decoder layers, adapters merged, and zero points that are not those of
    the weights: what is exported.
    """
    adapted = {f"{name}.weight": m for name, m in student.named_modules() if isinstance(m, LowBitLinear)}
    weights = {
        name: adapted[name].latent().detach() if name in adapted else p.detach()
        for name, p in student.named_parameters()
        if name.startswith("model.layers.") and MARK not in name
    }
    return weights | {name: b for name, b in student.named_buffers() if name.endswith(latent.ZERO_POINTS)}
