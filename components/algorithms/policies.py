"""The position policy: which main scale an activation has at which position.

Positions 0 and 1 of a language model carry values tens of times larger than all later ones (attention sinks), so one
static scale fits no position. The policy is a table of scales at a few knots with linear interpolation between them;
it costs nothing at inference and its logarithm is what training moves. Shapes: S sites, P knots, B batch, T tokens.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

from reflux.kernels.dual_scale_quant import largest_code

KNOTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Positions of the table's rows: dense where scales change, each later interval twice the one before."""


def knots_of(per_doubling: int) -> tuple[int, ...]:
    """KNOTS with so many in place of each one after the first; positions too near to be told apart are one."""
    doublings = len(KNOTS) - 2
    return (0, *sorted({round(2 ** (i / per_doubling)) for i in range(doublings * per_doubling + 1)}))


SCALE_RANGE = (1e-6, 1e3)
"""A scale outside of this has saturated: training is stopped rather than continued on it. What profile_kv gives a site
that never saw a value is within: at 8 bits its main grid of a thousandth has steps of 8e-6.
"""


class PositionTable(nn.Module):
    """Main and outlier scale of every site at every knot, [S, P, 2].

    Column 0 is the main scale that quantises. Column 1 is the outlier scale seen at calibration: it does not quantise
    (the outlier grid follows the token) but is what a deployed model compares its traffic with.
    """

    positions: torch.Tensor
    outlier_SP: torch.Tensor

    def __init__(self, sites: list[str], scales_SP2: torch.Tensor, knots: tuple[int, ...] = KNOTS) -> None:
        super().__init__()
        if scales_SP2.shape != (len(sites), len(knots), 2):
            raise ValueError(
                f"policy table {tuple(scales_SP2.shape)}: {len(sites)} sites and {len(knots)} knots need "
                f"{(len(sites), len(knots), 2)}"
            )
        if any(a >= b for a, b in pairwise((-1, *knots))):
            raise ValueError(f"policy knots {knots}: must be positions from 0 on that rise")
        twice = [site for site in sites if sites.count(site) > 1]
        if twice:
            raise ValueError(f"policy site {twice[0]!r} is named twice")
        self.sites, self.knots = list(sites), tuple(knots)
        self.index = {site: i for i, site in enumerate(sites)}
        self.log_main_SP = nn.Parameter(scales_SP2[..., 0].float().log())
        self.register_buffer("outlier_SP", scales_SP2[..., 1].float().clone())
        self.register_buffer("positions", torch.tensor(knots), persistent=False)

    def scales(self) -> torch.Tensor:
        """[S, P, 2] the table as it is deployed."""
        return torch.stack([self.log_main_SP.detach().exp(), self.outlier_SP], dim=-1)

    def for_bits(self, bits: dict[str, int], chosen_for: int) -> PositionTable:
        """The table for sites of these bits, from scales that were chosen for `chosen_for` of them: at each site the
        main grid ends where it did. A site without bits keeps its scales.
        """
        top = largest_code(chosen_for)
        factors = [top / largest_code(bits[site]) if site in bits else 1.0 for site in self.sites]
        if set(factors) == {1.0}:
            return self
        return PositionTable(self.sites, self.scales() * torch.tensor(factors)[:, None, None], self.knots)

    def main_scales(self, position_BT: torch.Tensor) -> torch.Tensor:
        """[S, B, T] main scale of every site at each position; beyond the last knot its value holds."""
        return interpolate(self.log_main_SP.exp(), self.positions, position_BT)

    def check(self) -> None:
        """ValueError naming the first site whose scale has left SCALE_RANGE or is not finite."""
        scales_SP = self.log_main_SP.detach().exp()
        bad_SP = ~((scales_SP >= SCALE_RANGE[0]) & (scales_SP <= SCALE_RANGE[1]))
        if bad_SP.any():
            s, p = bad_SP.nonzero()[0].tolist()
            raise ValueError(
                f"policy saturated: main scale of {self.sites[s]} at position {self.knots[p]} is "
                f"{scales_SP[s, p]:.3g}, allowed is {SCALE_RANGE[0]:g} to {SCALE_RANGE[1]:g}; lower the policy's "
                f"learning rate or start from a longer profile"
            )


def interpolate(values_SP: torch.Tensor, knots_P: torch.Tensor, position_BT: torch.Tensor) -> torch.Tensor:
    """[S, B, T] values at each position, linear between knots, constant beyond the last."""
    right_BT = torch.bucketize(position_BT.contiguous(), knots_P).clamp(max=len(knots_P) - 1)
    left_BT = (right_BT - 1).clamp(min=0)
    span_BT = (knots_P[right_BT] - knots_P[left_BT]).clamp(min=1)
    share_BT = ((position_BT - knots_P[left_BT]) / span_BT).clamp(0, 1).to(values_SP.dtype)
    left_SBT = values_SP[:, left_BT]
    return left_SBT + share_BT * (values_SP[:, right_BT] - left_SBT)


def interpolation_error(values_ST: torch.Tensor, knots: tuple[int, ...] = KNOTS) -> torch.Tensor:
    """[S] how far a table that holds the values of its knots is from the others: |interpolated − value| / value, mean
    over the positions 0 to T − 1.
    """
    held = tuple(knot for knot in knots if knot < values_ST.shape[1])
    position_1T = torch.arange(values_ST.shape[1])[None]
    found_ST = interpolate(values_ST[:, list(held)], torch.tensor(held), position_1T)[:, 0]
    return ((found_ST - values_ST) / values_ST).abs().mean(-1)


def nearest_knot(position_N: torch.Tensor, knots: tuple[int, ...] = KNOTS) -> torch.Tensor:
    """[N] index of the knot nearest to each position: where calibration files what it sees."""
    middle = torch.tensor([(a + b) / 2 for a, b in pairwise(knots)], device=position_N.device)
    return torch.bucketize(position_N.float(), middle)
