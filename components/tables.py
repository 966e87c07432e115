"""Tables as Parquet bytes: the same rows give the same bytes, and a column that breaks the contract is named.

A Parquet file depends on the chunks in which its rows arrive and on the order of metadata: here both are settled, and
nothing in a file tells when it was written. A column may name its encoding (`schemas.column`): numbers of many digits
that hardly repeat are smaller with their bytes split into streams, everything else keeps Parquet's dictionaries.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from reflux.components.canonical import canonical, sha256_hex

ROW_GROUP_ROWS_NESTED = 512  # rows with arrays: some 10 to 100 kB each, and a reader holds one group
ROW_GROUP_ROWS_FLAT = 65_536
ENCODING = b"encoding"
"""Key of a field's metadata: the Parquet encoding of its numbers."""


def encode(name: str, table: pa.Table, schema: pa.Schema) -> pa.Buffer:
    """Parquet (zstd) of a table that follows the schema; ValueError naming table and column if it does not."""
    table = _conforming(name, table, schema)
    stream = pa.BufferOutputStream()
    try:
        pq.write_table(table, stream, **parquet_options(schema))
    except pa.ArrowInvalid as error:  # nulls within an array of non-nullable elements
        raise ValueError(f"table {name}: {error}") from error
    return stream.getvalue()


def parquet_options(schema: pa.Schema) -> dict[str, Any]:
    """How pyarrow.parquet.write_table has to be called for tables of the schema."""
    nested = any(pa.types.is_nested(field.type) for field in schema)
    encodings = {
        _leaf(field): field.metadata[ENCODING].decode() for field in schema if ENCODING in (field.metadata or {})
    }
    return {
        "compression": "zstd",
        "compression_level": 3,
        "version": "2.6",
        "row_group_size": ROW_GROUP_ROWS_NESTED if nested else ROW_GROUP_ROWS_FLAT,
        "column_encoding": encodings or None,
        "use_dictionary": [path for field in schema if (path := _leaf(field)) not in encodings],
    }


def fingerprint(schema: pa.Schema) -> str:
    """sha256 over the columns' names, types and nullability, in order."""
    return sha256_hex(canonical([[field.name, str(field.type), field.nullable] for field in schema]))


def metadata(schema: pa.Schema) -> dict[str, str]:
    return {key.decode(): value.decode() for key, value in sorted((schema.metadata or {}).items())}


def read(name: str, source: Any, columns: list[str] | None) -> pa.Table:
    """A whole table from a file's path or a buffer."""
    file = pq.ParquetFile(source)
    return file.read(columns=_known(name, file.schema_arrow, columns))


def batches(name: str, source: Any, columns: list[str] | None) -> Iterator[pa.RecordBatch]:
    """One batch per row group."""
    with pq.ParquetFile(source) as file:
        yield from groups(name, file, columns)


def groups(name: str, file: pq.ParquetFile, columns: list[str] | None) -> Iterator[pa.RecordBatch]:
    """One batch per row group of an open file; a group is read when its batch is asked for."""
    known = _known(name, file.schema_arrow, columns)
    for group in range(file.num_row_groups):
        yield from file.read_row_group(group, columns=known).combine_chunks().to_batches()


def _known(name: str, schema: pa.Schema, columns: list[str] | None) -> list[str] | None:
    for column in columns or ():
        if column not in schema.names:  # pyarrow leaves an unknown column out without a word
            near = difflib.get_close_matches(column, schema.names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise ValueError(f"table {name} has no column {column!r}{hint} It has {schema.names}")
    return columns


def _conforming(name: str, table: pa.Table, schema: pa.Schema) -> pa.Table:
    if missing := [column for column in schema.names if column not in table.schema.names]:
        raise ValueError(f"table {name}: columns {missing} are missing")
    if unknown := [column for column in table.schema.names if column not in schema.names]:
        raise ValueError(f"table {name}: columns {unknown} are not in its schema, which has {schema.names}")
    if len(table.schema.names) != len(schema.names):
        raise ValueError(f"table {name}: a column stands twice in {table.schema.names}")
    columns = []
    for field in schema:
        column = table.column(field.name)
        if _shape(column.type) != _shape(field.type):
            raise ValueError(
                f"table {name}, column {field.name!r}: {column.type} was given, {field.type} is the contract"
            )
        if not field.nullable and column.null_count:
            raise ValueError(
                f"table {name}, column {field.name!r}: {column.null_count} rows are null, the contract allows none"
            )
        columns.append(column if column.type == field.type else column.cast(field.type))
    return pa.Table.from_arrays(columns, schema=schema.with_metadata(metadata(schema) or None)).combine_chunks()


def _leaf(field: pa.Field) -> str:
    """The path of a column's values within the Parquet schema."""
    path, dtype = field.name, field.type
    while pa.types.is_nested(dtype):
        path, dtype = f"{path}.list.element", dtype.value_type
    return path


def _shape(dtype: pa.DataType) -> str:
    """A type without the names and nullability of array elements, in which tables built from Python lists differ."""
    if pa.types.is_fixed_size_list(dtype):
        return f"[{dtype.list_size}]{_shape(dtype.value_type)}"
    if pa.types.is_list(dtype):
        return f"[]{_shape(dtype.value_type)}"
    return str(dtype)
