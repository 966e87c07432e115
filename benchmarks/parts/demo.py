"""What benchmarks take from the demo: its model, and our own prompts."""

from __future__ import annotations

from typing import Any

from reflux.components import sources
from reflux.components.records import read_records
from reflux.pipelines import recipes

MODEL, PROMPTS = recipes.SMOLLM2, recipes.demo().collect_traces.prompts_uri


def in_turn(count: int) -> list[dict[str, Any]]:
    """The first prompts of each dimension, in turn."""
    by_dimension: dict[str, list[dict[str, Any]]] = {}
    for record in read_records(sources.fetch(PROMPTS)):
        by_dimension.setdefault(record.values["dimension"], []).append(record.values)
    return [row for rows in zip(*by_dimension.values(), strict=False) for row in rows][:count]
