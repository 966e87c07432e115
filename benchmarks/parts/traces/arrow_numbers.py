"""The numbers of nested Arrow columns as flat arrays."""

from __future__ import annotations

import numpy as np
import pyarrow as pa


def flat(column: pa.ChunkedArray) -> np.ndarray:
    values = column.combine_chunks()
    while pa.types.is_nested(values.type):
        values = values.flatten()
    return values.to_numpy(zero_copy_only=False)
