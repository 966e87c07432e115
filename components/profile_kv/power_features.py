"""Two of the three features of compute power, read off the forward that the profile makes anyway: the largest attention
weight and the norm of the FFN's output. The third, the cost of the cache, is measured by decoding.

Shapes: B sequences, T tokens, D channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from reflux.components.algorithms.attention_rows import largest_weights
from reflux.components.algorithms.attention_watch import intercepted_attention, require_plain
from reflux.components.algorithms.low_bit import decoder_layers


class PowerWatch:
    """What one forward shows: [B, T] by layer."""

    def __init__(self, model: Any, attention_layers: Sequence[int]) -> None:
        """`attention_layers` are those whose attention counts, none for all. ValueError for one that is not there."""
        self.model = model
        depth = len(decoder_layers(model))
        if beyond := [layer for layer in attention_layers if not 0 <= layer < depth]:
            raise ValueError(f"profile_kv.power_attention_layers {beyond}: the student has layers 0 to {depth - 1}")
        self.layers = frozenset(attention_layers or range(depth))
        self.peaks: dict[int, Tensor] = {}
        self.norms: dict[int, Tensor] = {}

    def features(self) -> Tensor:
        """[B, T, 2] of the forward since the last call: the largest attention weight, mean over the chosen layers and
        all heads, and the L2 norm of the FFN's output, mean over all layers.
        """
        if missing := sorted(self.layers - self.peaks.keys()):
            raise ValueError(f"profile_kv.power_attention_layers {missing}: the student's attention was not seen there")
        means = [torch.stack(list(of_layers.values())).mean(0) for of_layers in (self.peaks, self.norms)]
        self.peaks, self.norms = {}, {}
        return torch.stack(means, -1)

    @contextmanager
    def watching(self) -> Iterator[None]:
        layers = enumerate(decoder_layers(self.model))
        handles = [layer.get_submodule("mlp").register_forward_hook(self._norm_of(i)) for i, layer in layers]
        try:
            with intercepted_attention(self.model, self._peak):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _peak(
        self, attend: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> Any:
        if module.layer_idx in self.layers:
            require_plain(module, options)
            self.peaks[module.layer_idx] = largest_weights(query, key, mask, options["scaling"]).mean(1)
        return attend(module, query, key, value, mask, **options)

    def _norm_of(self, layer: int) -> Any:
        def hook(module: Any, args: Any, output_BTD: Tensor) -> None:
            self.norms[layer] = output_BTD.float().norm(dim=-1)

        return hook
