"""What the KV cache holds and costs: the norm of K by position, and the time and bytes of a decoded token.

Shapes: B sequences, H KV heads, T tokens, d channels of a head.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from reflux.components.algorithms.rollouts import cache_argument


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
        """Rows of schemas.K_NORMS for every position that was seen."""
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


@torch.no_grad()
def decode_costs(model: Any, prompt: list[int], response: list[int]) -> list[tuple[int, int, float]]:
    """(position, bytes of K and V held, microseconds in the cache's update over all layers) of each response token.

    The answer is fed token by token as it was given; the clock is monotonic and on the host, so on a GPU this is the
    time to issue the update, not to finish it.
    """
    cache = getattr(model(**_inputs(prompt, 0), use_cache=True, logits_to_keep=1), cache_argument(model))
    spent_ns = 0
    untimed = cache.update

    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal spent_ns
        begin = time.perf_counter_ns()
        result = untimed(*args, **kwargs)
        spent_ns += time.perf_counter_ns() - begin
        return result

    cache.update = timed
    costs = []
    for offset, token in enumerate(response):
        spent_ns, position = 0, len(prompt) + offset
        model(**_inputs([token], position), **{cache_argument(model): cache}, use_cache=True, logits_to_keep=1)
        held_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        costs.append((position, held_bytes, spent_ns / 1000))
    return costs


def _inputs(token_ids: list[int], position: int) -> dict[str, torch.Tensor]:
    input_BT = torch.tensor([token_ids])
    return {"input_ids": input_BT, "position_ids": torch.arange(position, position + len(token_ids))[None]}
