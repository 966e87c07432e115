"""Look into a model's attention while it runs, whichever implementation computes it.

sdpa and flash attention return no weights, so what is wanted of them is recomputed from the rotated queries and keys, a
few rows at a time: the whole T x T map never exists.

Shapes: B sequences, H query heads, G KV heads, n = H / G, T queries, S keys, R rows of a block, d channels of a head.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .low_bit import decoder_layers

ROWS = 64
"""Queries whose weights exist together."""

Intercept = Callable[..., Any]
"""(attend, module, query_BHTd, key_BGSd, value_BGSd, mask, **options) -> what attend(module, query, …) returns."""


@contextmanager
def intercepted_attention(model: Any, intercept: Intercept) -> Iterator[None]:
    """Within the block, every attention of the model goes through `intercept`, which is handed the function to call.

    The model keeps its implementation and its masks. ValueError if its attention cannot be reached this way.
    """
    name = model.config._attn_implementation
    listed = name in ALL_ATTENTION_FUNCTIONS
    attend = ALL_ATTENTION_FUNCTIONS[name] if listed else _eager(model)
    ALL_ATTENTION_FUNCTIONS[name] = functools.partial(intercept, attend)
    try:
        yield
    finally:
        if listed:
            ALL_ATTENTION_FUNCTIONS[name] = attend
        else:
            del ALL_ATTENTION_FUNCTIONS[name]


def largest_weights(query_BHTd: Tensor, key_BGSd: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """[B, H, T] the largest post-softmax weight of each query, fp32.

    `mask` is what the attention gets: None (causal), bool (True may be looked at) or additive, [B, 1 or H, T, S]. The
    largest weight is exp(max - logsumexp) of the row.
    """
    heads, queries, groups, keys = query_BHTd.shape[1], query_BHTd.shape[2], key_BGSd.shape[1], key_BGSd.shape[2]
    query_BGnTd = query_BHTd.float().unflatten(1, (groups, heads // groups)) * scaling
    key_BG1dS = key_BGSd.float().transpose(-1, -2)[:, :, None]
    peaks = []
    for first in range(0, queries, ROWS):
        rows = slice(first, min(first + ROWS, queries))
        score_BGnRS = query_BGnTd[..., rows, :] @ key_BG1dS
        if mask is None:
            last_R1 = torch.arange(rows.start, rows.stop, device=score_BGnRS.device)[:, None] + keys - queries
            allowed = torch.arange(keys, device=score_BGnRS.device) <= last_R1
        else:
            held = mask[:, :, rows, :keys]
            allowed = held[:, :, None] if held.shape[1] == 1 else held.unflatten(1, (groups, heads // groups))
        if allowed.dtype == torch.bool:
            score_BGnRS = score_BGnRS.masked_fill(~allowed, -torch.inf)
        else:
            score_BGnRS = score_BGnRS + allowed
        peaks.append((score_BGnRS.amax(-1) - score_BGnRS.logsumexp(-1)).exp().flatten(1, 2))
    return torch.cat(peaks, -1)


def require_plain(module: Any, options: dict[str, Any]) -> None:
    """ValueError for an attention that does more than scale, mask and softmax: its weights are not recomputed here."""
    given = sorted(name for name in ("softcap", "s_aux", "position_bias") if options.get(name) is not None)
    if given:
        raise ValueError(
            f"{type(module).__name__}: its attention uses {', '.join(given)}, which is not recomputed here"
        )


def _eager(model: Any) -> Callable[..., Any]:
    """The model file's own eager attention, which the library's table does not list."""
    attention = type(decoder_layers(model)[0].self_attn)
    eager = getattr(sys.modules[attention.__module__], "eager_attention_forward", None)
    if eager is None:
        raise ValueError(f"{attention.__name__}: its attention is not called through transformers' attention functions")
    return eager
