"""States and attention of a batch of answers as the tables beside their traces, joined by trace_id and position.

Shapes: T response tokens, M kept positions, S rows of a table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from reflux.components.collect_traces.captured import Captured


def state_table(captured: Sequence[tuple[str, Captured]], schema: pa.Schema) -> pa.Table:
    """`captured_schemas.kv_states` of (trace id, what was captured), in their order."""
    states = [(trace_id, state) for trace_id, of_trace in captured for state in of_trace.states]
    columns: dict[str, pa.Array] = {
        name: pa.array([getattr(state, name) for _, state in states], schema.field(name).type)
        for name in ("layer", "step", "position", "window_tokens")
    }
    columns["trace_id"] = pa.array([trace_id for trace_id, _ in states], pa.string())
    numbers = np.concatenate([np.zeros(0, np.float16), *(state.state.numpy().reshape(-1) for _, state in states)])
    dtype = schema.field("state").type
    if pa.types.is_fixed_size_list(dtype):
        columns["state"] = _nested(numbers, dtype)
    else:
        offsets = pa.array(np.cumsum([0, *(len(state.state) for _, state in states)]), pa.int32())
        columns["state"] = pa.ListArray.from_arrays(offsets, _nested(numbers, dtype.value_type), type=dtype)
    return pa.table([columns[name] for name in schema.names], schema=schema)


def attention_table(captured: Sequence[tuple[str, Captured]], schema: pa.Schema) -> pa.Table:
    """`captured_schemas.attention` of (trace id, what was captured), in their order."""
    layers = [
        (trace_id, layer, sparse) for trace_id, of_trace in captured for layer, sparse in of_trace.attention.items()
    ]
    lengths = [len(sparse.coverage_R) for _, _, sparse in layers]
    ids = pa.DictionaryArray.from_arrays(
        pa.array(np.repeat(np.arange(len(layers)), lengths), pa.int32()),
        pa.array([t for t, _, _ in layers], pa.string()),
    )
    columns = {
        "trace_id": ids.cast(pa.string()),
        "layer": pa.array(np.repeat([layer for _, layer, _ in layers], lengths), pa.int32()),
        "position": pa.array(np.concatenate([np.zeros(0), *map(np.arange, lengths)]), pa.int32()),
    }
    for name, field, dtype in (
        ("attended", "positions_RM", np.int32),
        ("weights", "weights_RM", np.float16),
        ("coverage", "coverage_R", np.float32),
        ("entropy_nats", "entropy_nats_R", np.float32),
    ):
        parts = [getattr(sparse, field).cpu().numpy().astype(dtype).reshape(-1) for _, _, sparse in layers]
        columns[name] = _nested(np.concatenate([np.zeros(0, dtype), *parts]), schema.field(name).type)
    return pa.table([columns[name] for name in schema.names], schema=schema)


def _nested(numbers: np.ndarray, dtype: pa.DataType) -> pa.Array:
    """Flat numbers as fixed-size lists of fixed-size lists, as deep as the type is."""
    if pa.types.is_fixed_size_list(dtype):
        return pa.FixedSizeListArray.from_arrays(_nested(numbers, dtype.value_type), type=dtype)
    return pa.array(numbers, dtype)
