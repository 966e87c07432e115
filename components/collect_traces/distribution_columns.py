"""The columns of a trace store: what is kept of the teacher's distribution at each token, without a Python object for
each number.

Shapes: T response tokens, K kept tokens, U distinct drawn tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from torch import Tensor

from reflux.components.algorithms.sampled_teacher import SampledTeacher
from reflux.components.algorithms.sparse_teacher import SparseTeacher


def topk_columns(sparse: Sequence[SparseTeacher], schema: pa.Schema) -> dict[str, pa.Array]:
    """One entry for each answer; OverflowError or ArrowInvalid for an id that the column's type does not hold."""
    fields = {
        "topk_token_ids": [of_answer.token_ids_NK for of_answer in sparse],
        "topk_logprobs": [of_answer.logprobs_NK for of_answer in sparse],
        "tail_logmass": [of_answer.tail_logmass_N for of_answer in sparse],
    }
    return {name: ragged(rows, schema.field(name).type) for name, rows in fields.items()}


def sampled_columns(sampled: Sequence[SampledTeacher], schema: pa.Schema) -> dict[str, pa.Array]:
    """The same for draws: only places with a count are stored."""
    tokens = np.cumsum([0, *(len(of_answer.counts_NU) for of_answer in sampled)])
    distinct = [(of_answer.counts_NU > 0).sum(-1).numpy() for of_answer in sampled]
    places = np.cumsum(np.concatenate([[0], *distinct]))
    fields = {
        "sampled_token_ids": [of_answer.token_ids_NU[of_answer.counts_NU > 0] for of_answer in sampled],
        "sampled_counts": [of_answer.counts_NU[of_answer.counts_NU > 0] for of_answer in sampled],
    }
    columns = {}
    for name, rows in fields.items():
        dtype = schema.field(name).type
        numbers = _numbers(np.concatenate([row.numpy() for row in rows]), dtype.value_type.value_type)
        of_token = pa.ListArray.from_arrays(pa.array(places, pa.int32()), numbers, type=dtype.value_type)
        columns[name] = pa.ListArray.from_arrays(pa.array(tokens, pa.int32()), of_token, type=dtype)
    return columns


def ragged(rows: Sequence[Tensor], dtype: pa.DataType) -> pa.Array:
    """A list column from one tensor for each answer: [T] or [T, K]."""
    offsets = pa.array(np.cumsum([0, *map(len, rows)]), type=pa.int32())
    flat, item = np.concatenate([row.numpy() for row in rows]), dtype.value_type
    if pa.types.is_fixed_size_list(item):
        values = pa.FixedSizeListArray.from_arrays(_numbers(flat.reshape(-1), item.value_type), type=item)
    else:
        values = _numbers(flat, item)
    return pa.ListArray.from_arrays(offsets, values, type=dtype)


def _numbers(values: np.ndarray, dtype: pa.DataType) -> pa.Array:
    """Floats rounded to the type, whole numbers checked: an id that wrapped around would name another token."""
    if pa.types.is_floating(dtype):
        # pyarrow's own way to the numpy type, to_pandas_dtype, needs pandas, which the images do without
        return pa.array(values.astype(pa.nulls(0, dtype).to_numpy().dtype), type=dtype)
    return pa.array(values).cast(dtype)
