"""The report's plots."""

from __future__ import annotations

import math
from typing import Any

import matplotlib as mpl
from matplotlib.ticker import LogLocator

from reflux.components.algorithms.gap_closed import GapClosed
from reflux.components.figures import STYLE, inline_svg, new_axes

from .row import Row

COLORS = {
    "teacher": "#6b7280",
    "full": "#111827",
    "weights_only": "#2563eb",
    "plain": "#b91c1c",
    "rotated": "#7c3aed",
    "undistilled": "#d97706",
    "distilled": "#059669",
    "deployed": "#064e3b",
}
"""By role; each keeps a contrast of 3 or more on white and differs in lightness too."""

POINTS_PER_INCH = 72
LABEL_POINTS = 10.0
"""From one label to the next."""

PHASE_SHADES = ("#f3f4f6", "#e0f2fe", "#ecfdf5", "#fef3c7")
CURVES = {
    "loss_nats": ("loss", "#c4b5fd", 4.5),
    "kl_forward_nats": ("KL(T‖S)", "#059669", 1.6),
    "kl_reverse_nats": ("KL(S‖T)", "#d97706", 1.6),
}
"""Metric of the training table -> label, colour, width. The loss may be one of the divergences: a band behind it."""


NAMES = {"heldout": "held-out\nanswers", "text": "evaluation\ntext"}


def training_curves(training: list[dict[str, Any]]) -> str:
    """Loss and divergence by step, the phases as shades behind them. "" if the table has none of these metrics."""
    points = {metric: [(row["step"], row["value"]) for row in training if row["metric"] == metric] for metric in CURVES}
    if not any(points.values()):
        return ""
    with mpl.rc_context(STYLE):
        figure, axes = new_axes("optimizer step", "nats per token")
        for (phase, first, last), shade in zip(_phases(training), PHASE_SHADES * len(training), strict=False):
            axes.axvspan(first - 0.5, last + 0.5, color=shade, linewidth=0)
            axes.annotate(
                phase, ((first + last) / 2, 1), (0, -4), xycoords=("data", "axes fraction"),
                textcoords="offset points", ha="center", va="top", color="#6b7280", fontsize=8,
            )  # fmt: skip
        for metric, (label, color, width) in CURVES.items():
            if points[metric]:
                steps, values = zip(*points[metric], strict=True)
                marker = "." if len(steps) < 10 else None
                axes.plot(steps, values, color=color, label=label, linewidth=width, marker=marker)
        axes.set_ylim(bottom=0, top=1.12 * axes.get_ylim()[1])  # room for the names of the phases
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize=8, loc="upper right", bbox_to_anchor=(1, 0.93))
        return inline_svg(figure, "training")


def error_by_layer(rows: list[Row]) -> str:
    """How far each layer's output is from full precision, for every quantised scheme."""
    with mpl.rc_context(STYLE):
        figure, axes = new_axes("decoder layer", "relative error of its output")
        for row in rows:
            if row.layer_errors and row.role != "full":
                marker = "." if len(row.layer_errors) < 10 else None
                axes.plot(row.layer_errors, color=COLORS[row.role], label=row.scheme, marker=marker)
        axes.set_ylim(bottom=0)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize=8)
        return inline_svg(figure, "layers")


def error_by_position(rows: list[Row]) -> str:
    """How far what the output head reads is from full precision, along an answer."""
    with mpl.rc_context(STYLE):
        figure, axes = new_axes("response token", "relative error before the head")
        for row in rows:
            if row.position_errors and row.role != "full":
                errors = {1 + each.first_position: each.relative_error for each in row.position_errors}
                axes.plot([*errors], [*errors.values()], color=COLORS[row.role], label=row.scheme, marker=".")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
        return inline_svg(figure, "positions")


def perplexity_by_bits(rows: list[Row]) -> str:
    """What a scheme costs in perplexity against what it costs in bits."""
    bits = [row.effective_bits + row.effective_bits_activation for row in rows]
    middle = (min(bits) * max(bits)) ** 0.5
    perplexities = [row.perplexity for row in rows]
    with mpl.rc_context(STYLE):
        figure, axes = new_axes("bits per weight + bits per activation", "perplexity of the text")
        axes.set_xscale("log", base=2)
        axes.set_xlim(min(bits) / 1.25, max(bits) * 1.25)
        axes.xaxis.set_major_formatter("{x:g}")
        if max(perplexities) > 3 * min(perplexities):
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.scatter(bits, perplexities, color=[COLORS[row.role] for row in rows], s=36, zorder=3)
        axes.margins(y=0.15)
        axes.minorticks_off()
        figure.draw_without_rendering()  # the layout decides how far apart labels are
        taken: dict[str, float] = {"left": -math.inf, "right": -math.inf}
        for row, x in sorted(zip(rows, bits, strict=True), key=lambda item: item[0].perplexity):
            align, offset = ("left", (7.0, -3.0)) if x <= middle else ("right", (4.0, 7.0))
            height = axes.transData.transform((x, row.perplexity))[1] / figure.dpi * POINTS_PER_INCH + offset[1]
            shift = max(0.0, taken[align] + LABEL_POINTS - height)  # above the label below it
            taken[align] = height + shift
            axes.annotate(
                f"{row.scheme}  {row.perplexity:,.1f}", (x, row.perplexity), (offset[0], offset[1] + shift),
                textcoords="offset points", ha=align, fontsize=8,
            )  # fmt: skip
        return inline_svg(figure, "bits")


def gap_closed(gaps: dict[str, GapClosed], thresholds: dict[str, float]) -> str:
    """Where the distilled student stands between the undistilled one (0) and full precision (1), and what the gate
    asks for.
    """
    with mpl.rc_context(STYLE):
        figure, axes = new_axes("share of the gap closed, with 95 % interval", "", height_inches=2.0)
        for y, (name, gap) in enumerate(gaps.items()):
            axes.plot([0, 1], [y, y], color="#e5e7eb", linewidth=8, solid_capstyle="butt", zorder=1)
            if thresholds[name]:
                axes.plot([thresholds[name]] * 2, [y - 0.2, y + 0.2], color="#6b7280", zorder=2)
            if gap.value is not None:
                axes.scatter(gap.value, y, color=COLORS["distilled"], s=60, zorder=4)
            if gap.low is not None and gap.high is not None:
                axes.plot([gap.low, gap.high], [y, y], color=COLORS["distilled"], linewidth=3, zorder=3)
        axes.set_yticks(range(len(gaps)), [NAMES[name] for name in gaps])
        axes.set_ylim(len(gaps) - 0.4, -0.6)
        axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
        axes.grid(axis="y", visible=False)
        return inline_svg(figure, "gap")


def _phases(training: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    """(phase, first step, last step) in the order of training."""
    steps: dict[str, list[int]] = {}
    for row in training:
        steps.setdefault(row["phase"], []).append(row["step"])
    return sorted(((phase, min(of), max(of)) for phase, of in steps.items()), key=lambda item: item[1])
