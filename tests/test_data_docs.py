"""docs/data.md, data-inside.md: each table of the contract with an example row that follows it and a query that runs
on that row.
"""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, get_type_hints

import duckdb
import pyarrow as pa
import pytest

from reflux.components import captured_schemas, profile_schemas, schemas, tables

PAGES = [(Path(__file__).parents[1] / "docs" / name).read_text() for name in ("data.md", "data-inside.md")]
MODULES = {module.__name__.rpartition(".")[2]: module for module in (schemas, captured_schemas, profile_schemas)}
SIZES: dict[str, tuple[Any, ...]] = {
    "traces_topk": (2, 49_152),
    "traces_sampled": (32, 49_152),
    "kv_states": (2, 2, "head"),
    "attention": (2,),
}
"""Arguments of the schemas that depend on a configuration, as the examples have them."""


@dataclass(frozen=True, kw_only=True)
class Section:
    table: str
    """Stage and name, e.g. collect_traces.traces."""
    schema: str
    example: dict[str, Any]
    queries: list[str]
    """For DuckDB."""
    code: list[str]
    """For Polars."""


def sections() -> list[Section]:
    found = []
    for chapter in [part for page in PAGES for part in re.split(r"^## ", page, flags=re.MULTILINE)[1:]]:
        stage, *parts = re.split(r"^### ", chapter, flags=re.MULTILINE)
        for part in parts:
            heading = re.match(r"`(\w+)`", part)
            schema = re.search(r"`((?:\w+_)?schemas\.\w+)`", part)
            example = re.search(r"^```json\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
            queries = re.findall(r"^```sql\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
            code = re.findall(r"^```python\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
            assert heading, part
            assert schema, part
            assert example, part
            assert queries, part
            found.append(
                Section(
                    table=f"{stage.split()[0]}.{heading[1]}",
                    schema=schema[1],
                    example=json.loads(example[1]),
                    queries=queries,
                    code=code,
                )
            )
    return found


SECTIONS = sections()
each_section = pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.schema)


def contract(name: str) -> pa.Schema:
    module, _, member = name.partition(".")
    value = getattr(MODULES[module], member)
    return value if isinstance(value, pa.Schema) else value(*SIZES[member])


def encoded(section: Section) -> pa.Buffer:
    schema, row = contract(section.schema), dict(section.example)
    for field in schema:
        if pa.types.is_timestamp(field.type) and row[field.name] is not None:
            row[field.name] = datetime.fromisoformat(row[field.name])
    assert row.keys() == set(schema.names)
    return tables.encode(section.schema, pa.Table.from_pylist([row], schema=schema), schema)


def test_every_table_of_the_contract_is_shown() -> None:
    declared = {
        f"{name}.{member}"
        for name, module in MODULES.items()
        for member, value in vars(module).items()
        if isinstance(value, pa.Schema) or (inspect.isfunction(value) and get_type_hints(value)["return"] is pa.Schema)
    }
    assert {section.schema for section in SECTIONS} == declared


@each_section
def test_an_example_follows_its_contract(section: Section) -> None:
    table = tables.read(section.schema, pa.BufferReader(encoded(section)), None)
    assert table.schema.equals(contract(section.schema))
    assert table.num_rows == 1


@each_section
def test_its_queries_run(section: Section, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    connection = duckdb.connect()
    for other in [*SECTIONS[::-1], section]:  # the first of two tables of a name stays, but for the other's own queries
        file = Path("data", *other.table.split("."), "00000")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encoded(other))
        connection.sql(f"CREATE SCHEMA IF NOT EXISTS {other.table.split('.')[0]}")
        connection.sql(f"CREATE OR REPLACE VIEW {other.table} AS FROM read_parquet('{file}')")
    for query in section.queries:
        connection.sql(query).fetchall()
    for code in section.code:
        exec(compile(code, "docs", "exec"), {})
