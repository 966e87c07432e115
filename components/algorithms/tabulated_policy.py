"""A policy network becomes a position table: its corrections, averaged over the tokens of calibration sequences.

A table costs nothing and is what a bundle carries. It is warmed up from a network or from calibration statistics and
never left random: a network that has learned nothing is refused.

Shapes: B sequences, T tokens, S sites, P knots.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .low_bit import watching_sites
from .output_head import final_hidden_states
from .policies import nearest_knot


@dataclass(frozen=True, kw_only=True)
class Corrections:
    mean_SP: Tensor
    """Of the logarithm of the main scale, over the tokens nearest to each knot; a knot without any repeats the one
    before."""
    unexplained_nats: float
    """Root mean square, over tokens and sites, of what a token's own correction is beside that of its knot: what the
    network knew and no table can hold."""


@torch.no_grad()
def corrections(model: Any, batches: Iterable[tuple[Tensor, Tensor, Tensor]]) -> Corrections:
    """What the model's policy network adds to the table, over batches of token ids, mask and position ids, all [B, T].

    ValueError if the network was never trained.
    """
    if not model.policy_network.is_trained():
        raise ValueError(
            "policy network: has learned nothing yet, and a table made of it would be the one before; train it first"
        )
    policy, decoder = model.policy, model.model
    shape = (len(policy.sites), len(policy.knots))
    count_P = torch.zeros(shape[1], dtype=torch.float64)
    sum_SP, square_SP = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
    for input_BT, mask_BT, position_BT in batches:
        valid_BT = mask_BT.bool()
        knot_N = nearest_knot(position_BT.expand_as(mask_BT)[valid_BT], policy.knots).cpu()
        log_table_SBT = policy.main_scales(position_BT).log()

        def see(site: str, x_BTD: Tensor, valid_BT: Tensor = valid_BT, knot_N: Tensor = knot_N,
                log_table_SBT: Tensor = log_table_SBT) -> None:  # fmt: skip
            at = policy.index[site]
            added_BT = (decoder.main_scales[at].log() - log_table_SBT[at]).expand(valid_BT.shape)
            added_N = added_BT[valid_BT].double().cpu()
            sum_SP[at].index_add_(0, knot_N, added_N)
            square_SP[at].index_add_(0, knot_N, added_N.square())

        with watching_sites(model, see):
            final_hidden_states(model, input_BT, mask_BT, position_BT)
        count_P += torch.bincount(knot_N, minlength=shape[1])
    if not count_P[0]:
        raise ValueError("policy network: no calibration sequence has a token at the table's first knot")
    mean_SP = sum_SP / count_P.clamp(min=1)
    apart_SP = (square_SP - count_P * mean_SP.square()).clamp(min=0)
    for p in range(1, shape[1]):
        if not count_P[p]:
            mean_SP[:, p] = mean_SP[:, p - 1]
    unexplained = (apart_SP.sum() / (count_P.sum() * shape[0])).sqrt().item()
    return Corrections(mean_SP=mean_SP.float(), unexplained_nats=unexplained)
