"""A few columns of a large table, read from the store without the rest of it, and verified all the same.

The sha256 of a whole shard says nothing about a piece of it. So the manifest of a large table also lists its parts, one
per column of a row group and the footer last, each with a sha256 of its own. A reader fetches the footer, which says
where the columns are, and then exactly the parts of the columns that it wants.
"""

from __future__ import annotations

import bisect
import hashlib
from itertools import accumulate, pairwise
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from reflux.components.canonical import sha256_hex
from reflux.components.provenance import ArtifactError, Shard
from reflux.components.storage import Store
from reflux.components.stores.s3_file import RangeFile

SMALL_BYTES = 1 << 20  # below, one request for everything costs less than several for a part of it


def parts(data: pa.Buffer) -> list[list[Any]]:
    """[length in bytes, sha256] of the parts of a Parquet file, in order and without gaps; [] for a small one."""
    if data.size < SMALL_BYTES:
        return []
    metadata = pq.read_metadata(pa.BufferReader(data))
    columns = [
        metadata.row_group(group).column(column)
        for group in range(metadata.num_row_groups)
        for column in range(metadata.num_columns)
    ]
    starts = sorted(min(c.data_page_offset, c.dictionary_page_offset or c.data_page_offset) for c in columns)
    footer = data.size - 8 - int.from_bytes(data[data.size - 8 : data.size - 4].to_pybytes(), "little")
    cuts = [0, *starts[1:], footer, data.size]
    return [[end - start, hashlib.sha256(data[start:end]).hexdigest()] for start, end in pairwise(cuts)]


def open_parquet(store: Store, shard: Shard, place: str) -> pq.ParquetFile:
    """The table of a shard that has parts, without reading more than its footer.

    `place` names the object in messages. What is read from the table later is fetched then, and ArtifactError names the
    object if it is missing or was changed.
    """
    ends = [*accumulate(length for length, _ in shard.parts)]
    starts = [0, *ends]

    def fetch(start: int, length: int) -> bytes:
        first, last = bisect.bisect_right(ends, start), bisect.bisect_left(ends, start + length)
        begin = starts[first]
        try:
            data = store.read_range(shard.object, begin, ends[last] - begin)
        except FileNotFoundError as error:
            raise ArtifactError(f"{place}: missing (shard {shard.name})") from error
        for n in range(first, last + 1):
            if sha256_hex(data[starts[n] - begin : ends[n] - begin]) != shard.parts[n][1]:
                span = f"bytes {starts[n]} to {ends[n]}"
                raise ArtifactError(f"{place}: changed (shard {shard.name}): {span} are not those of its manifest")
        return data[start - begin : start - begin + length]

    footer = shard.parts[-1][0]
    metadata = pq.read_metadata(pa.BufferReader(fetch(shard.bytes - footer, footer)))
    whole = pa.PythonFile(RangeFile(shard.bytes, fetch), mode="r")
    return pq.ParquetFile(whole, metadata=metadata, pre_buffer=False)  # buffering ahead would fetch the gaps as well
