"""Count what a deployed model's traffic does against the thresholds stored at calibration.

The dynamic outlier scale of a request would make the share a constant; a stored threshold makes it tell how far
traffic has moved.

Shapes: B sequences, T tokens, N of them that count, D channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from reflux.components.algorithms.low_bit import watching_sites

FIRST_POSITION = 4
"""Tokens before it do not count, at calibration as in service. The first two take values up to a thousand times those
of all later ones, whatever is asked: with them, a hundredth of the tokens of answers shorter than 200, the thresholds
of some sites would lie where nothing else ever comes.
"""


@dataclass
class OutlierCount:
    """(token, site) pairs from FIRST_POSITION on, and those whose largest |x| lies beyond the site's threshold."""

    seen: int = 0
    beyond: int = 0

    @property
    def share(self) -> float:
        """In [0, 1]; 0 before anything was seen."""
        return self.beyond / self.seen if self.seen else 0.0


@contextmanager
def counting_outliers(model: Any, thresholds: dict[str, float]) -> Iterator[OutlierCount]:
    """Within the block, count the forwards of `model`; `thresholds` are those of quant_config.json, by site.

    A site whose activations are not rounded has no threshold, and nothing of it is counted.
    """
    count = OutlierCount()
    if not thresholds:
        yield count
        return
    counts_BT = torch.empty(0)

    def begin(decoder: Any, args: tuple, kwargs: dict) -> None:
        nonlocal counts_BT
        counts_BT = kwargs["position_ids"] >= FIRST_POSITION

    def see(site: str, x_BTD: torch.Tensor) -> None:
        if site not in thresholds:
            return
        largest_N = x_BTD.abs().amax(-1)[counts_BT.expand(x_BTD.shape[:2])]
        count.seen += len(largest_N)
        count.beyond += int((~(largest_N <= thresholds[site])).sum())  # NaN is beyond as well

    handle = model.model.register_forward_pre_hook(begin, with_kwargs=True)
    try:
        with watching_sites(model, see):
            yield count
    finally:
        handle.remove()
