"""How long K is at each layer and position: where the cache needs a finer grid, since attention's error grows with it.

Shapes: B sequences, H KV heads, L layers, T tokens, d channels of a head.
"""

from __future__ import annotations

from typing import Any

import torch


class KNorms:
    """Sums over sequences of the head-mean norm of K, by layer and position."""

    def __init__(self, layers: int, positions: int) -> None:
        self.count = torch.zeros(positions, dtype=torch.int64)
        self.sum_LT = torch.zeros(layers, positions, dtype=torch.float64)
        self.square_LT = torch.zeros(layers, positions, dtype=torch.float64)

    def update(self, cache: Any, mask_BT: torch.Tensor) -> None:
        """Add a batch's cache, whose keys [B, H, T, d] are stored after rotation."""
        tokens = mask_BT.shape[1]
        self.count[:tokens] += mask_BT.sum(0)
        for layer, held in enumerate(cache.layers):
            norm_BT = held.keys.float().norm(dim=-1).mean(1).double() * mask_BT
            self.sum_LT[layer, :tokens] += norm_BT.sum(0)
            self.square_LT[layer, :tokens] += norm_BT.pow(2).sum(0)

    def rows(self) -> list[dict[str, Any]]:
        """Rows of profile_schemas.K_NORMS for every position that was seen."""
        rows = []
        for layer in range(len(self.sum_LT)):
            for position, count in enumerate(self.count.tolist()):
                if count:
                    mean = self.sum_LT[layer, position].item() / count
                    variance = self.square_LT[layer, position].item() / count - mean**2
                    std = max(variance, 0.0) ** 0.5
                    rows.append(
                        {
                            "layer": layer,
                            "position": position,
                            "sequences": count,
                            "k_norm_mean": mean,
                            "k_norm_std": std,
                        }
                    )
        return rows
