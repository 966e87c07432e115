"""Policies that read: small networks beside the position table, which correct it by what the block before has seen.

The table knows only where a token stands. A network reads the activation that enters a block's FFN, as it was rounded,
and says how much coarser or finer the main grid of the *next* block's sites should be at this token: `mlp` reads the
mean over the tokens so far, `attention` weighs them. The outlier grid follows the token whatever the policy. A network
begins as the table itself, since its last map is zero; it sees no later token, and keeps what it needs of earlier ones
in the cache of a generation, so that token by token is the whole sequence.

Networks are for training. What is deployed is the table that they become (tabulated_policy.py).

Shapes: B sequences, T tokens, U tokens that are looked back on, D channels, H width, E numbers kept of a token, L
layers but the last, C sites of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from .layer_bits import SITES
from .low_bit import decoder_layers, site_modules
from .slot_cache import SlotCache

BUDGET = 300_000
"""Parameters of a network at most."""
WIDTH = 64
"""Of a network whose budget allows it; a token then costs a generation's cache a sixth to a third of what SmolLM2's own
keys and values do."""
LARGEST_CORRECTION = math.log(8)
"""Of the logarithm of a scale: a network moves a grid by a factor of eight at most, and cannot saturate it."""

LookBack = Callable[[Tensor], tuple[Tensor, Tensor]]
"""What is kept of these tokens [B, T, E] -> that of all tokens so far [B, U, E], and which of them each may see
[B, T, U].
"""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """How a token's own maps and what was kept of the tokens so far become one vector."""

    own: int
    """Maps of the activation that only the token itself needs, H numbers each."""
    kept: int
    """Maps that later tokens need too."""
    pooled: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(own [B, T, own H], kept [B, U, kept H], visible [B, T, U]) -> [B, T, H]"""


def _mean(own_BTE: Tensor, kept_BUH: Tensor, visible_BTU: Tensor) -> Tensor:
    return (visible_BTU.float() @ kept_BUH) / visible_BTU.sum(-1, keepdim=True)


def _attended(query_BTH: Tensor, kept_BUE: Tensor, visible_BTU: Tensor) -> Tensor:
    key_BUH, value_BUH = kept_BUE.chunk(2, -1)
    scores_BTU = query_BTH @ key_BUH.transpose(-1, -2) / math.sqrt(query_BTH.shape[-1])
    return scores_BTU.masked_fill(~visible_BTU, -torch.inf).softmax(-1) @ value_BUH


POOLS = {
    "mlp": Pool(own=0, kept=1, pooled=_mean),
    "attention": Pool(own=1, kept=2, pooled=_attended),
}


class PolicyNetwork(nn.Module):
    """Corrections of the main scales of the sites of every layer but the first."""

    def __init__(self, kind: str, channels: int, layers: int, seed: int) -> None:
        """ValueError for an unknown kind, a model of one layer, or one that no width of the budget serves."""
        super().__init__()
        if kind not in POOLS:
            raise ValueError(f"policy {kind!r}: allowed are {', '.join(POOLS)}")
        if layers < 2:
            raise ValueError(f"policy {kind!r}: reads a layer for the next one, and the model has {layers}")
        self.kind, pool, sites = kind, POOLS[kind], len(SITES)
        maps, later = pool.own + pool.kept, layers - 1
        width = min(WIDTH, (BUDGET - later * sites) // (maps * channels + later * (1 + sites)))
        if width < 1:
            raise ValueError(
                f"policy {kind!r}: {channels} channels and {layers} layers take more than {BUDGET} parameters"
            )
        self.width = width
        generator = torch.Generator().manual_seed(seed)
        self.read_DE = nn.Parameter(torch.randn(channels, maps * width, generator=generator) / channels**0.5)
        self.bias_LH = nn.Parameter(torch.zeros(later, width))
        self.out_LHC = nn.Parameter(torch.zeros(later, width, sites))
        self.level_LC = nn.Parameter(torch.zeros(later, sites))

    def forward(self, x_BTD: Tensor, layer: int, look_back: LookBack) -> Tensor:
        """[B, T, C] what is added to the logarithm of the main scales of layer + 1, float32."""
        pool = POOLS[self.kind]
        with torch.autocast(x_BTD.device.type, enabled=False):
            x_BTD = nn.functional.rms_norm(x_BTD.float(), x_BTD.shape[-1:])  # sinks are a thousand times the rest
            own_BTE, kept_BTE = (x_BTD @ self.read_DE).split([pool.own * self.width, pool.kept * self.width], -1)
            hidden_BTH = nn.functional.silu(pool.pooled(own_BTE, *look_back(kept_BTE)) + self.bias_LH[layer])
            raw_BTC = hidden_BTH @ self.out_LHC[layer] + self.level_LC[layer]
            return LARGEST_CORRECTION * torch.tanh(raw_BTC / LARGEST_CORRECTION)

    def is_trained(self) -> bool:
        """Whether it says anything that the table does not."""
        return bool(self.out_LHC.any() or self.level_LC.any())


def attach(model: Any, kind: str, seed: int = 0) -> None:
    """Give a low-bit model with a position table a network, as `model.policy_network`: from now on every forward rounds
    by corrected scales, until that attribute is None. A network that is there already is replaced. ValueError if the
    model has no table, or as PolicyNetwork says.
    """
    if getattr(model, "policy", None) is None:
        raise ValueError(f"policy {kind!r}: corrects a position table, and the model rounds without one")
    hooked = hasattr(model, "policy_network")
    model.policy_network = PolicyNetwork(kind, model.config.hidden_size, len(decoder_layers(model)), seed)
    if hooked:
        return
    reader = _Reader(model)
    model.model.register_forward_pre_hook(reader.begin, with_kwargs=True)
    modules = site_modules(model)
    for layer in range(len(decoder_layers(model)) - 1):  # behind the hook that rounds
        modules[f"layers.{layer}.mlp_in"].register_forward_pre_hook(partial(reader.read, layer), with_kwargs=True)


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """Of the forward that is under way."""

    table_scales: list[Tensor]
    """[B, T] by site"""
    position_BT: Tensor
    visible_BTT: Tensor | None
    """None with a cache."""
    cache: SlotCache | None

    def look_back(self, layer: int, kept_BTE: Tensor) -> tuple[Tensor, Tensor]:
        if self.cache is None:
            assert self.visible_BTT is not None
            return kept_BTE, self.visible_BTT
        kept_BUE = self.cache.remember(layer, kept_BTE)
        so_far_U = torch.arange(kept_BUE.shape[1], device=kept_BUE.device)
        return kept_BUE, so_far_U <= self.position_BT[..., None]  # an entry's index is its position


class _Reader:
    """The hooks of one model."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def begin(self, decoder: Any, args: tuple, kwargs: dict) -> None:
        if self.model.policy_network is None:
            return
        cache = next((value for value in kwargs.values() if isinstance(value, Cache)), None)
        if cache is None and kwargs.get("use_cache"):
            raise ValueError("policy network: a generation needs a SlotCache from its first token on")
        if cache is not None and not isinstance(cache, SlotCache):
            raise ValueError(f"policy network: keeps what it has read in a SlotCache, not in a {type(cache).__name__}")
        position_BT, table_scales = kwargs["position_ids"], list(decoder.main_scales)
        visible_BTT = same_sequence_so_far(position_BT) if cache is None else None
        decoder.main_scales = list(table_scales)
        decoder.policy_reading = _Reading(
            table_scales=table_scales, position_BT=position_BT, visible_BTT=visible_BTT, cache=cache
        )

    def read(self, layer: int, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self.model.policy_network is None:
            return
        x_BTD = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        reading: _Reading = self.model.model.policy_reading
        correction_BTC = self.model.policy_network(x_BTD, layer, partial(reading.look_back, layer))
        for site, factor_BT in zip(SITES, correction_BTC.exp().unbind(-1), strict=True):
            at = self.model.policy.index[f"layers.{layer + 1}.{site}"]
            self.model.model.main_scales[at] = reading.table_scales[at] * factor_BT


def same_sequence_so_far(position_BT: Tensor) -> Tensor:
    """[B, T, T] whether the second token is of the first one's sequence and not after it. Where positions begin anew, a
    row's next sequence does.
    """
    column_T = torch.arange(position_BT.shape[-1], device=position_BT.device)
    begin_BT = column_T - position_BT
    return (begin_BT[..., None] == begin_BT[..., None, :]) & (column_T[:, None] >= column_T)
