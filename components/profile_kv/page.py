"""The profile as one page that a person reads: each plot under the question that it answers."""

from __future__ import annotations

from importlib.resources import files

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
    texts: dict[str, str] = {
        "activations": "The largest value at any site of a layer. A column that is brighter than its neighbours is why "
        "the quantiser's scales depend on the position. {outlier_share:.1%} of all values lie beyond the main grid; "
        "{bimodal_norm_share:.0%} of what the norms give out has two modes.",
        "k_norms": "After rotation, one line per layer, where a quarter of the sequences reach. The error that "
        "rounding brings into attention grows with it.",
        "cost": "Mean of all timings in each stretch of 100 positions; the mark is one standard deviation. {overhead}",
        "front": "Every mixture of attention, FFN and cost in steps of 0.1. To the right it orders the tokens of an "
        "answer more as their time does, upwards more as the teacher's uncertainty does.",
        "power": "P of the first trace under the chosen mixture, from the first token that counts.",
    }
    return texts[name].format(**metrics, overhead=_overhead(metrics) if name == "cost" else "")


def _overhead(metrics: dict[str, float]) -> str:
    """What timing itself adds, and whether that was more than chance."""
    added, token = metrics["profiler_overhead_us"], metrics["token_us_p50"]
    noise = metrics.get("profiler_noise_us")
    of_token = f"a token of {token:,.0f} \N{MICRO SIGN}s"
    if noise is not None and abs(added) < noise:
        return f"Timing adds too little to {of_token} to be seen: two decodes without it differ by {noise:,.0f}."
    return f"Timing itself adds {added:,.0f} to {of_token}."
