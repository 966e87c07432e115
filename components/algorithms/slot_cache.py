"""Keys and values of many sequences that start and end at different times.

Each sequence has a row (a slot) of one fixed buffer and begins at its index 0, so an entry's index is its position and
sequences of different length need no padding on the left. A finished sequence's slot is taken by another or filled by
the last one; nothing else moves, and a step adds one entry to each row in place instead of copying what is there.

Of a form with a window (kv_forms.py) the cache holds what a deployed one would: groups of entries that have left their
row's window are rounded, once, in place.

Shapes: S slots, B sequences being decoded (slots 0 to B - 1), N sequences being filled, R rows of which a group leaves
the window, H key-value heads, P entries of a slot, G entries of a group, T tokens, D channels of a head.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .kv_forms import KvForm, rounded_group, rounded_keys, rounded_values


def cache_argument(module: Any) -> str:
    """What a model or an attention calls its cache: transformers 5.2x renamed the argument; passing the old name still
    works there but warns.
    """
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


class SlotCache(Cache):
    """For a causal model's forward as its cache; `fill` or `decode` says beforehand what that forward does."""

    def __init__(self, *, layers: int, slots: int, capacity: int, form: KvForm | None = None) -> None:
        """`capacity` entries in each slot; memory is taken as entries are written. Of `form` only one with a window
        matters: the others' entries are rounded before they come here.
        """
        self.slots, self.capacity = slots, capacity
        self.form = form if form is not None and form.group else None
        self.filling_N: Tensor | None = None
        self.settled_N = self.leaving_R = torch.empty(0, dtype=torch.int64)
        self.decoding_B = self.position_B = torch.empty(0, dtype=torch.int64)
        self.entries = 0
        self.remembered: dict[int, Tensor] = {}
        super().__init__(layers=[_SlotLayer(self) for _ in range(layers)])

    @property
    def decodes(self) -> bool:
        """Whether the next forward reads one token for each slot."""
        return self.filling_N is None

    @property
    def entries_stay(self) -> bool:
        """Whether an entry is the same however far its sequence has gone on, so that another may copy it."""
        return self.form is None

    def fill(self, slots: list[int], lengths: list[int], device: torch.device) -> None:
        """The next forward reads N sequences of these lengths from their start, padded on the right; their entries go
        to `slots`.
        """
        self.filling_N, self.entries = torch.tensor(slots, device=device), 0
        if self.form is not None:
            self.settled_N = self.form.settled(torch.tensor(lengths, device=device) - 1)

    def decode(self, position_B: Tensor, longest: int) -> None:
        """The next forward reads one token for each of the first B slots, at its position; none is above `longest`."""
        self.filling_N, self.position_B, self.entries = None, position_B, longest
        if len(self.decoding_B) != len(position_B):
            self.decoding_B = torch.arange(len(position_B), device=position_B.device)
        if self.form is not None:
            self.leaving_R = (self.form.settled(position_B) > self.form.settled(position_B - 1)).nonzero()[:, 0]

    def copy(self, source: int, target: int, entries: int) -> None:
        """The first entries of one slot into another."""
        for layer in self.layers:
            for states_SHPD in (layer.keys, layer.values):
                states_SHPD[target, :, :entries] = states_SHPD[source, :, :entries]
        for held_SPE in self.remembered.values():
            held_SPE[target, :entries] = held_SPE[source, :entries]

    def remember(self, layer: int, kept_BTE: Tensor) -> Tensor:
        """Keep what something beside the model needs of this forward's tokens in later ones, E numbers a token, under
        the number of a layer; [B, U, E] what it is to read, as `update` of a layer has it of keys.
        """
        if layer not in self.remembered:
            self.remembered[layer] = kept_BTE.new_zeros(self.slots, self.capacity, kept_BTE.shape[-1])
        held_SPE = self.remembered[layer]
        if self.filling_N is not None:
            held_SPE[self.filling_N, : kept_BTE.shape[1]] = kept_BTE
            return kept_BTE
        held_SPE[self.decoding_B, self.position_B] = kept_BTE[:, 0]
        return held_SPE[: len(self.position_B), : self.entries + 1]


class _SlotLayer(CacheLayerMixin):
    is_sliding = False

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        slots, capacity = self.cache.slots, self.cache.capacity
        self.keys, self.values = (
            states.new_zeros(slots, states.shape[1], capacity, states.shape[3]) for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """What attention is to read: the sequences themselves while filling, else all entries so far."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache = self.cache
        if cache.filling_N is not None:
            kept = (key_states, value_states)
            if cache.form is not None:
                kept = self._settled(cache.form, key_states, value_states)
            self.keys[cache.filling_N, :, : key_states.shape[2]] = kept[0]
            self.values[cache.filling_N, :, : value_states.shape[2]] = kept[1]
            return key_states, value_states
        self.keys[cache.decoding_B, :, cache.position_B] = key_states[:, :, 0]
        self.values[cache.decoding_B, :, cache.position_B] = value_states[:, :, 0]
        if cache.form is not None and len(cache.leaving_R):
            self._settle_group(cache.form)
        rows, entries = len(cache.position_B), cache.entries + 1
        return self.keys[:rows, :, :entries], self.values[:rows, :, :entries]

    def _settled(self, form: KvForm, key_NHTD: Tensor, value_NHTD: Tensor) -> tuple[Tensor, Tensor]:
        """What a row's last token sees of it."""
        entry_T = torch.arange(key_NHTD.shape[2], device=key_NHTD.device)
        settled_N1T1 = (entry_T < self.cache.settled_N[:, None])[:, None, :, None]
        keys = rounded_keys(key_NHTD, (entry_T // form.group).expand(len(key_NHTD), -1), form.bits)
        return (
            torch.where(settled_N1T1, keys, key_NHTD),
            torch.where(settled_N1T1, rounded_values(value_NHTD, form), value_NHTD),
        )

    def _settle_group(self, form: KvForm) -> None:
        """Round the newest group outside of the window, in the rows in which the last token pushed it out."""
        row_R1 = self.cache.leaving_R[:, None]
        end_R1 = form.settled(self.cache.position_B[row_R1])
        entry_RG = end_R1 + torch.arange(-form.group, 0, device=end_R1.device)
        self.keys[row_R1, :, entry_RG] = rounded_group(self.keys[row_R1, :, entry_RG], form.bits)
        self.values[row_R1, :, entry_RG] = rounded_values(self.values[row_R1, :, entry_RG], form)

    def get_seq_length(self) -> int:
        """Entries before those of this forward; a shorter row's end is the attention mask's."""
        return self.cache.entries

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.entries + query_length, 0

    def get_max_length(self) -> int:
        return self.cache.capacity
