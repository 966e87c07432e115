"""Look into a model's attention while it runs, whichever implementation computes it.

sdpa and flash attention return no weights; attention_rows.py recomputes what is wanted of them from the rotated queries
and keys that pass here. Shapes: B sequences, H query heads, G KV heads, T queries, S keys, d channels of a head.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .low_bit import decoder_layers

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
