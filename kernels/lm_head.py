"""The output head as the fused losses take it: the projection, and what some families put behind it.

Shapes: N tokens, D hidden, P rows of the projection, of which models pad the last, V of them words of the tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .dispatch import DTYPES, on_triton


@dataclass(frozen=True, kw_only=True)
class LmHead:
    """What makes logits of final hidden states; ValueError if its parts cannot."""

    weight_PD: torch.Tensor
    vocab_size: int
    """Words of the tokenizer; rows from here on are padding and take no part."""
    scale: float = 1.0
    """Factor of every logit, before the cap."""
    soft_cap: float = 0.0
    """Bound of the logits, cap * tanh(logit / cap); 0 for none."""

    def __post_init__(self) -> None:
        if self.weight_PD.ndim != 2 or not 1 <= self.vocab_size <= len(self.weight_PD):
            shape = tuple(self.weight_PD.shape)
            raise ValueError(f"vocab_size {self.vocab_size}: must be between 1 and the rows of weight_PD {shape}")
        if self.soft_cap < 0:
            raise ValueError(f"soft_cap {self.soft_cap}: must be above 0, or 0 for none")

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """[N, V] in float32, or in float64 where the hidden states are: rounding logits to a narrower type would cost
        the gradient a tenth of its value.
        """
        dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
        logits_NV = hidden_ND.to(dtype) @ self.weight_PD[: self.vocab_size].to(dtype).T * self.scale
        return torch.tanh(logits_NV / self.soft_cap) * self.soft_cap if self.soft_cap else logits_NV

    def require_fitting(self, hidden_ND: torch.Tensor) -> None:
        """ValueError unless the hidden states have the width, dtype and device of the projection."""
        weight = self.weight_PD
        if hidden_ND.ndim != 2 or hidden_ND.shape[1] != weight.shape[1]:
            raise ValueError(f"hidden_ND {tuple(hidden_ND.shape)}: the head reads [N, {weight.shape[1]}]")
        if (hidden_ND.dtype, hidden_ND.device) != (weight.dtype, weight.device):
            found = f"{hidden_ND.dtype} on {hidden_ND.device}"
            raise ValueError(f"hidden_ND in {found}: the head is in {weight.dtype} on {weight.device}")
        if on_triton(hidden_ND.device) and hidden_ND.dtype not in DTYPES:
            raise ValueError(f"hidden_ND in {hidden_ND.dtype}: a kernel takes {', '.join(map(str, DTYPES))}")
