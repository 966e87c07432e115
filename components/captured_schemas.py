"""The tables beside the traces: what went on inside the teacher, by trace_id and position (schemas.py has the rest)."""

from __future__ import annotations

import pyarrow as pa

from reflux.components.schemas import SPLIT_BYTES, TRACE_ID, column


def _array(dtype: pa.DataType, width: int) -> pa.DataType:
    return pa.list_(pa.field("element", dtype, nullable=False), width)


def kv_states(heads: int, channels: int, pooling: str) -> pa.Schema:
    """KV states of a teacher at its decisions, a row for each trace, layer and step. H heads, d channels of each; W
    tokens of the window.
    """
    per_head = _array(_array(pa.float16(), 2 * channels), heads)
    dtype, meaning = {
        "head": (per_head, "[H, 2d] keys and values side by side, mean over the window"),
        "full": (
            pa.list_(pa.field("element", per_head, nullable=False)),
            "[W, H, 2d] keys and values side by side, oldest token first",
        ),
    }[pooling]
    return pa.schema(
        [
            TRACE_ID,
            column("layer", pa.int32(), "decoder layer, from 0"),
            column("step", pa.int32(), "reasoning step of the trace, from 0"),
            column(
                "position", pa.int32(), "index into the response of the step's first token, which the state decides"
            ),
            column("window_tokens", pa.int32(), "W: tokens before it that the state covers"),
            column("state", dtype, meaning, encoding=SPLIT_BYTES),
        ]
    )


def attention(top: int) -> pa.Schema:
    """What each response token of a teacher looks at, a row for each trace, layer and token. M kept positions."""
    return pa.schema(
        [
            TRACE_ID,
            column("layer", pa.int32(), "decoder layer, from 0"),
            column("position", pa.int32(), "index of the looking token in the response"),
            column(
                "attended",
                _array(pa.int32(), top),
                "[M] indices of the tokens looked at, counted from the prompt's first; -1 where fewer can be seen",
                encoding=SPLIT_BYTES,
            ),
            column(
                "weights",
                _array(pa.float16(), top),
                "[M] attention weights after softmax, mean over heads, falling",
                encoding=SPLIT_BYTES,
            ),
            column("coverage", pa.float32(), "share of the token's attention that is in them"),
            column("entropy_nats", pa.float32(), "entropy of the token's whole head-mean attention, nats"),
        ]
    )
