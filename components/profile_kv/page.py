"""The profile as one page that a person reads: each plot under the question that it answers."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from reflux.components.figures import svg_file

TITLES = {
    "activations": "Where are the outliers?",
    "k_norms": "How long is K?",
    "cost": "What does the KV cache cost a token?",
    "front": "How is compute power weighed?",
    "power": "Where does a sequence spend its power?",
}


def render(figures: dict[str, str], metrics: dict[str, float], *, traces: int, tokens: int) -> str:
    """The page; `figures` are inline SVG by the names of TITLES."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    told = [(TITLES[name], _text(name, metrics), Markup(figure)) for name, figure in figures.items()]
    return template.render(figures=told, traces=traces, tokens=f"{tokens:,}")


def figure_files(figures: dict[str, str]) -> dict[str, bytes]:
    """Shard name -> SVG file."""
    return {f"plots/{name}.svg": svg_file(figure) for name, figure in figures.items()}


def _text(name: str, metrics: dict[str, float]) -> str:
    texts: dict[str, Any] = {
        "activations": "The largest value at any site of a layer. A column that is brighter than its neighbours is why "
        "the quantiser's scales depend on the position. {outlier_share:.1%} of all values lie beyond the main grid; "
        "{bimodal_norm_share:.0%} of what the norms give out has two modes.",
        "k_norms": "After rotation, one line per layer. The error that rounding brings into attention grows with it.",
        "cost": "Mean of all timings in each stretch of 100 positions; the bar's mark is one standard deviation. "
        "Timing itself added {profiler_overhead_us:.0f} µs to a token of {token_us_p50:,.0f} µs{noise}.",
        "front": "Every mixture of attention, FFN and cost in steps of 0.1. To the right it orders the tokens of an "
        "answer more as their time does, upwards more as the teacher's uncertainty does.",
        "power": "P of the first trace under the chosen mixture, from the first token that counts.",
    }
    noise = metrics.get("profiler_noise_us")
    told = "" if noise is None else f" (two decodes without it differ by {noise:,.0f} µs)"
    return texts[name].format(**metrics, noise=told)
