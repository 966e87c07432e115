"""How plots look in every page of ours, and their form: SVG inside HTML that needs no file and no font, ids apart."""

from __future__ import annotations

import io
import re
from typing import Any

import matplotlib as mpl

mpl.use("svg")

from matplotlib.figure import Figure

STYLE = {
    "svg.fonttype": "none",  # text stays text: it is selectable and takes the page's font
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": "#374151",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "grid.linewidth": 0.7,
    "xtick.color": "#6b7280",
    "ytick.color": "#6b7280",
    "text.color": "#111827",
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}
WIDTH_INCHES, HEIGHT_INCHES = 4.8, 3.1
"""About a phone's width at 72 dots per inch, so text stays readable there."""


def new_axes(x_label: str, y_label: str, height_inches: float = HEIGHT_INCHES) -> tuple[Figure, Any]:
    """An empty plot; call it, and draw, under `mpl.rc_context(STYLE)`."""
    figure = Figure(
        figsize=(WIDTH_INCHES, height_inches), layout="constrained"
    )  # no pyplot: it would keep every figure
    axes = figure.add_subplot(xlabel=x_label, ylabel=y_label)
    return figure, axes


def inline_svg(figure: Figure, name: str) -> str:
    """The figure as an <svg> element of an HTML page, on which `name` is no other figure's."""
    with mpl.rc_context({"svg.hashsalt": name}):  # ids that are the same in every run
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]  # the XML prologue names a DTD on the web
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    tag, rest = svg.split(">", 1)
    tag = re.sub(r'\s(?:xmlns(?::\w+)?|version|width|height)="[^"]*"', "", tag)  # HTML needs none of them
    rest = rest.replace("xlink:href", "href")
    for reference in ('id="', 'href="#', "url(#"):  # every plot counts its ids from 1
        rest = rest.replace(reference, f"{reference}{name}-")
    return f"{tag}>{rest}"


def svg_file(inline: str) -> bytes:
    """The same as a file of its own."""
    return inline.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1).encode()
