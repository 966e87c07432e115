"""The option tables of the documents: a field that stands there exists, and has the default that stands beside it.

A table is one of options if its header is a stage and the word default: | `distill.` | default | … A row may hold
several fields, with as many defaults, in JSON.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from reflux.pipelines.recipes import STAGES

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("components/*/README.md")])
TABLE = re.compile(r"^\| `(\w+)\.` \| default \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", re.MULTILINE)
CODE = re.compile(r"`([^`]*)`")


def options() -> list[tuple[str, str, str]]:
    """Stage, field, and the default as written."""
    found = []
    for page in PAGES:
        for stage, rows in TABLE.findall(page.read_text("utf-8")):
            for row in rows.splitlines():
                names, defaults = (CODE.findall(cell) for cell in row.split("|")[1:3])
                found += [(stage, name, default) for name, default in zip(names, defaults, strict=True)]
    return found


def defaults_of(stage: str) -> dict[str, Any]:
    return {
        f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        for f in dataclasses.fields(STAGES[stage])
    }


@pytest.mark.parametrize(("stage", "name", "default"), options(), ids=lambda value: str(value)[:40])
def test_a_field_has_the_default_that_is_written(stage: str, name: str, default: str) -> None:
    value, written = defaults_of(stage)[name], json.loads(default)
    assert (written, type(written)) == (value, type(value))


@pytest.mark.parametrize("stage", ["distill", "calibrate"])
def test_every_field_is_in_one_row(stage: str) -> None:
    assert Counter(name for of, name, _ in options() if of == stage) == Counter([*defaults_of(stage)])
