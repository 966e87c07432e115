"""An exponential moving average of the trained parameters, started from the weights themselves (objectives.md, rule
14).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch


class Ema:
    """average ← decay * average + (1 − decay) * parameter after every optimizer step, by parameter name."""

    def __init__(self, named_parameters: Mapping[str, torch.Tensor], decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"ema_decay {decay}: must be in [0, 1); 0 keeps the last weights")
        self.decay = decay
        self.average = {name: p.detach().clone() for name, p in named_parameters.items()} if decay else {}

    @torch.no_grad()
    def update(self, named_parameters: Mapping[str, torch.Tensor]) -> None:
        for name, average in self.average.items():
            average.lerp_(named_parameters[name].detach(), 1 - self.decay)

    @torch.no_grad()
    def copy_to(self, named_parameters: Mapping[str, torch.Tensor]) -> None:
        for name, average in self.average.items():
            named_parameters[name].copy_(average)

    @contextmanager
    def exchanged(self, named_parameters: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Within the block the parameters are the average; their own values are back after it."""
        self._exchange(named_parameters)
        try:
            yield
        finally:
            self._exchange(named_parameters)

    @torch.no_grad()
    def _exchange(self, named_parameters: Mapping[str, torch.Tensor]) -> None:
        for name, average in self.average.items():
            own = named_parameters[name].detach().clone()
            named_parameters[name].copy_(average)
            average.copy_(own)
