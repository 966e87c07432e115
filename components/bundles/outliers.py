"""Count what a deployed model's traffic does against the thresholds stored at calibration.

The dynamic outlier scale of a request would make the share a constant; a stored threshold makes it tell how far
traffic has moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from reflux.components.algorithms.low_bit import watching_sites


@dataclass
class OutlierCount:
    """(token, site) pairs seen, and those whose largest |x| lies beyond the site's threshold."""

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

    def see(site: str, x_BTD: torch.Tensor) -> None:
        if site not in thresholds:
            return
        largest_BT = x_BTD.abs().amax(-1)
        count.seen += largest_BT.numel()
        count.beyond += int((~(largest_BT <= thresholds[site])).sum())  # NaN is beyond as well

    with watching_sites(model, see):
        yield count
