"""The report: one HTML page that needs nothing else, now or in ten years.

Prompts and answers are other people's text, so everything is escaped by the template engine; only the plots, made here,
are inserted as they are. The page forbids itself every request and every script.
"""

from __future__ import annotations

import math
from collections import defaultdict
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from reflux.components.algorithms.gap_closed import GapClosed

from . import plots
from .heldout import Trace
from .row import Row

NONE = "\N{EN DASH}"


def render(
    summary: dict[str, Any],
    rows: list[Row],
    *,
    prompts: list[Trace],
    training: list[dict[str, Any]],
) -> str:
    """The page. `summary` is what metrics.json holds; `training` are the rows of the student's training table."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(number=number, percent=percent, megabytes=megabytes)
    gaps = {name: GapClosed(**gap) for name, gap in summary["gap_closed"].items()}
    thresholds = {name: summary["config"][f"min_gap_closed_{name}"] for name in gaps}
    template = environment.from_string(files(__package__).joinpath("report.html").read_text(encoding="utf-8"))
    return template.render(
        summary=summary,
        by_role={row["role"]: row for row in summary["table"]},
        colors={row.scheme: plots.COLORS[row.role] for row in rows},
        figures={
            "training": Markup(plots.training_curves(training)),
            "layers": Markup(plots.error_by_layer(rows)),
            "positions": Markup(plots.error_by_position(rows)) if any(row.position_errors for row in rows) else "",
            "bits": Markup(plots.perplexity_by_bits(rows)),
            "gap": Markup(plots.gap_closed(gaps, thresholds)),
        },
        answers=[
            (trace.prompt, [(row.scheme, row.generations[index]) for row in rows])
            for index, trace in enumerate(prompts)
        ],
        phases=_training_summary(training),
    )


def number(value: float | None, digits: int = 3) -> str:
    """1234.5 -> 1,234.5; as many decimals as leave `digits` significant ones."""
    if value is None:
        return NONE
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.0f} %"


def megabytes(value: int) -> str:
    return f"{value / 1e6:,.0f} MB" if value >= 1e7 else f"{value / 1e6:,.2f} MB"


def _training_summary(training: list[dict[str, Any]]) -> dict[str, int]:
    """Phase -> its number of steps."""
    steps: dict[str, set[int]] = defaultdict(set)
    for row in training:
        steps[row["phase"]].add(row["step"])
    return {phase: len(numbers) for phase, numbers in steps.items()}
