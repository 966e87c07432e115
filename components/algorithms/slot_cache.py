"""Keys and values of many sequences that start and end at different times.

Each sequence has a row (a slot) of one fixed buffer and begins at its index 0, so an entry's index is its position and
sequences of different length need no padding on the left. A finished sequence's slot is taken by another or filled by
the last one; nothing else moves, and a step adds one entry to each row in place instead of copying what is there.

Shapes: S slots, B sequences being decoded (slots 0 to B - 1), N sequences being filled, H key-value heads, P entries of
a slot, T tokens, D channels of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotCache(Cache):
    """For a causal model's forward as its cache; `fill` or `decode` says beforehand what that forward does."""

    def __init__(self, *, layers: int, slots: int, capacity: int) -> None:
        """`capacity` entries in each slot; memory is taken as entries are written."""
        self.slots, self.capacity = slots, capacity
        self.filling_N: Tensor | None = None
        self.decoding_B = self.position_B = torch.empty(0, dtype=torch.int64)
        self.entries = 0
        super().__init__(layers=[_SlotLayer(self) for _ in range(layers)])

    def fill(self, slots: list[int], device: torch.device) -> None:
        """The next forward reads N sequences from their start, padded on the right; their entries go to `slots`."""
        self.filling_N, self.entries = torch.tensor(slots, device=device), 0

    def decode(self, position_B: Tensor, longest: int) -> None:
        """The next forward reads one token for each of the first B slots, at its position; none is above `longest`."""
        self.filling_N, self.position_B, self.entries = None, position_B, longest
        if len(self.decoding_B) != len(position_B):
            self.decoding_B = torch.arange(len(position_B), device=position_B.device)

    def copy(self, source: int, target: int, entries: int) -> None:
        """The first entries of one slot into another."""
        for layer in self.layers:
            for states_SHPD in (layer.keys, layer.values):
                states_SHPD[target, :, :entries] = states_SHPD[source, :, :entries]


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
            self.keys[cache.filling_N, :, : key_states.shape[2]] = key_states
            self.values[cache.filling_N, :, : value_states.shape[2]] = value_states
            return key_states, value_states
        self.keys[cache.decoding_B, :, cache.position_B] = key_states[:, :, 0]
        self.values[cache.decoding_B, :, cache.position_B] = value_states[:, :, 0]
        rows, entries = len(cache.position_B), cache.entries + 1
        return self.keys[:rows, :, :entries], self.values[:rows, :, :entries]

    def get_seq_length(self) -> int:
        """Entries before those of this forward; a shorter row's end is the attention mask's."""
        return self.cache.entries

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.entries + query_length, 0

    def get_max_length(self) -> int:
        return self.cache.capacity
