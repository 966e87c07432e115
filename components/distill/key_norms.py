"""The norms of K that profile_kv found, as the policy reads them. Shapes: L layers, T positions."""

from __future__ import annotations

import torch
from torch import Tensor

from reflux.components.artifacts import Artifact


def norms_of_keys(profile: Artifact) -> tuple[Tensor, Tensor]:
    """[L, T] mean norm at each position, and [T] how many sequences reached it, 0 for none."""
    table = profile.table("k_norms", ["layer", "position", "sequences", "k_norm_mean"])
    layer_N, position_N, sequences_N = (
        torch.tensor(table[name].to_pylist()) for name in ("layer", "position", "sequences")
    )
    norm_LT = torch.zeros(int(layer_N.max()) + 1, int(position_N.max()) + 1)
    norm_LT[layer_N, position_N] = torch.tensor(table["k_norm_mean"].to_pylist())
    sequences_T = torch.zeros(norm_LT.shape[1], dtype=torch.int64)
    sequences_T[position_N] = sequences_N
    return norm_LT, sequences_T
