"""Have a model's attention read keys and values as a quantised cache would give them back, whether there is a cache or
not: a forward that scores a whole sequence sees what one that generates it token by token sees.

Grids of a token's own (int8, int4) are that simple: each new key and value is rounded before it is kept and read. In
KIVI's forms it depends on the reader: a token sees what is near to it in full precision, and a later token sees the
same key rounded. There a whole sequence attends to two copies of all keys and values, rounded and not, and the
attention mask leaves each query one of the two. A cache of transformers holds full precision and is rounded anew by
each forward; a SlotCache, from which rollouts are made, rounds a group once, when it leaves the window.

Shapes: B sequences, T queries, S keys, H KV heads, D channels of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .kv_forms import KV_FORMS, KvForm, rounded_keys, rounded_per_token, rounded_values
from .slot_cache import SlotCache, cache_argument

MASKED_ATTENTION = ("eager", "sdpa")
"""Implementations that take any mask."""


def round_cache(model: Any, attentions: Iterable[nn.Module], name: str) -> None:
    """From now on the attention modules of `model` read keys and values in the form `name`.

    ValueError for a model whose attention keeps its cache in another way, or takes no mask of ours.
    """
    form = KV_FORMS[name]
    if form.group and model.config._attn_implementation not in MASKED_ATTENTION:
        raise ValueError(
            f"kv_cache {name!r}: needs an attention that takes any mask, {' or '.join(MASKED_ATTENTION)}, and the "
            f"model has {model.config._attn_implementation!r}"
        )
    if form.group and getattr(model.config, "sliding_window", None):
        raise ValueError(
            f"kv_cache {name!r}: {type(model).__name__} has layers that forget what is {model.config.sliding_window} "
            "tokens back, and groups of tokens are known for layers that keep all; take int8 or int4"
        )
    for attention in attentions:
        argument = cache_argument(attention)
        if argument not in inspect.signature(attention.forward).parameters:
            raise ValueError(f"kv_cache {name!r}: {type(attention).__name__} takes no cache that is known here")
        attention.register_forward_pre_hook(_Reading(model, form, argument), with_kwargs=True)
    model.kv_form = form


def form_in_use(model: Any) -> KvForm | None:
    """The form in which a forward of `model` reads keys and values at this moment; None is full precision."""
    return getattr(model, "kv_form", None) if getattr(model, "rounds_activations", True) else None


class _Reading:
    """Forward pre-hook of an attention: puts itself between it and its cache."""

    def __init__(self, model: Any, form: KvForm, argument: str) -> None:
        self.model, self.form, self.argument = model, form, argument

    def __call__(self, attention: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        cache = kwargs.get(self.argument)
        if form_in_use(self.model) is None:
            return None
        if not self.form.group:
            return args, {**kwargs, self.argument: _PerToken(cache=cache, bits=self.form.bits)}
        if isinstance(cache, SlotCache) and cache.decodes:
            return None
        held = 0 if cache is None else cache.get_seq_length(attention.layer_idx)
        position_BT = kwargs["position_ids"]
        earlier_BS = position_BT[:, :1] + torch.arange(-held, 0, device=position_BT.device)
        position_BS = torch.cat([earlier_BS, position_BT], -1)
        settled_BTS = position_BS[:, None] < self.form.settled(position_BT)[:, :, None]
        if not settled_BTS.any():
            return None
        twice = _Twice(cache=cache, form=self.form, group_BS=_groups(position_BS, self.form.group))
        mask = _either(kwargs.get("attention_mask"), settled_BTS[:, None])
        return args, {**kwargs, self.argument: twice, "attention_mask": mask}


@dataclass(frozen=True, kw_only=True)
class _PerToken:
    """A cache, or none, that is given rounded keys and values."""

    cache: Any
    bits: int

    def update(self, key_BHTD: Tensor, value_BHTD: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rounded = rounded_per_token(key_BHTD, self.bits), rounded_per_token(value_BHTD, self.bits)
        return rounded if self.cache is None else self.cache.update(*rounded, *args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class _Twice:
    """A cache, or none, that gives back all keys and values rounded, and behind them the same in full precision."""

    cache: Any
    form: KvForm
    group_BS: Tensor

    def update(self, key_BHTD: Tensor, value_BHTD: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        key_BHSD, value_BHSD = key_BHTD, value_BHTD
        if self.cache is not None:
            key_BHSD, value_BHSD = self.cache.update(key_BHTD, value_BHTD, *args, **kwargs)
        group_BS = self.group_BS.expand(len(key_BHSD), -1)
        keys = rounded_keys(key_BHSD, group_BS, self.form.bits), key_BHSD
        values = rounded_values(value_BHSD, self.form), value_BHSD
        return torch.cat(keys, 2), torch.cat(values, 2)


def _groups(position_BS: Tensor, size: int) -> Tensor:
    """The number of each token's group. A group begins wherever a position is a multiple of its size: sequences that
    stand in one row share none, and padding changes only groups that no token sees rounded.
    """
    begun_BS = (position_BS % size == 0).cumsum(-1)
    return begun_BS - begun_BS[:, :1]


def _either(mask: Tensor | None, settled_B1TS: Tensor) -> Tensor:
    """The mask over both copies. `mask` is one of transformers': True or 0 where a query attends, False or a large
    negative number elsewhere, None for all up to the query itself.
    """
    if mask is None:
        queries, keys = settled_B1TS.shape[-2:]
        mask = torch.ones(queries, keys, dtype=torch.bool, device=settled_B1TS.device).tril(keys - queries)
    if mask.dtype == torch.bool:
        return torch.cat([mask & settled_B1TS, mask & ~settled_B1TS], -1)
    never = torch.finfo(mask.dtype).min
    return torch.cat([mask.masked_fill(~settled_B1TS, never), mask.masked_fill(settled_B1TS, never)], -1)
