"""The profile's plots: outliers by layer and position, norms of K, cost of the cache, how power is weighed."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize

from reflux.components.figures import STYLE, inline_svg, new_axes

INK, FAINT, GOOD, WARM, COOL = "#111827", "#9ca3af", "#059669", "#d97706", "#2563eb"
REACHED = 4
"""A position that fewer than a quarter of the sequences reach shows those few, not the position."""
WIDEST = 2**31 - 1
"""position_to of the last stretch, which has no end."""


def largest_activations(activations: list[dict[str, Any]]) -> str:
    """Map of the largest |x| of each layer by stretch of positions, over all its sites."""
    layers = sorted({row["layer"] for row in activations})
    stretches = sorted({(row["position_from"], row["position_to"]) for row in activations})
    absmax = np.full((len(layers), len(stretches)), np.nan)
    for row in activations:
        place = layers.index(row["layer"]), stretches.index((row["position_from"], row["position_to"]))
        absmax[place] = np.nanmax([absmax[place], row["absmax"]])
    with mpl.rc_context(STYLE):
        figure, axes = new_axes("position in the sequence", "decoder layer")
        norm = LogNorm(max(np.nanmin(absmax), 1e-3), max(np.nanmax(absmax), 2e-3))
        mesh = axes.pcolormesh(absmax, cmap="viridis", norm=norm)
        bar = figure.colorbar(mesh, ax=axes, label="largest |x|", format="{x:,g}")
        _plain(bar)
        _layer_ticks(axes, layers, 0.5)
        axes.set_xticks(
            np.arange(len(stretches)) + 0.5, [_stretch(*ends) for ends in stretches], rotation=45, fontsize=8
        )
        axes.grid(visible=False)
        return inline_svg(figure, "activations")


def k_norms(rows: list[dict[str, Any]]) -> str:
    """Mean norm of K by position, a line per layer."""
    layers = sorted({row["layer"] for row in rows})
    most = max(row["sequences"] for row in rows)
    rows = [row for row in rows if REACHED * row["sequences"] >= most]
    with mpl.rc_context(STYLE):
        figure, axes = new_axes("position in the sequence", "norm of K, mean over heads")
        shades = mpl.colormaps["viridis"]
        for layer in layers:
            own = sorted((row["position"], row["k_norm_mean"]) for row in rows if row["layer"] == layer)
            positions, means = zip(*own, strict=True)
            axes.plot(positions, means, color=shades(layer / max(1, layers[-1])), linewidth=0.9)
        axes.set_xscale("symlog", linthresh=8, linscale=0.6)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xticks([at for at in (0, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048) if at <= axes.get_xlim()[1]])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        scale = ScalarMappable(Normalize(0, max(1, layers[-1])), shades)
        _plain(figure.colorbar(scale, ax=axes, label="decoder layer"))
        return inline_svg(figure, "k-norms")


def cost_by_bucket(buckets: list[dict[str, Any]]) -> str:
    """Update and read of a token, one on the other, with one standard deviation of their sum."""
    with mpl.rc_context(STYLE):
        figure, axes = new_axes("position in the sequence", "microseconds per token, all layers")
        middles = np.arange(len(buckets))
        update, read = (np.array([row[f"{part}_us_mean"] for row in buckets]) for part in ("update", "read"))
        deviation = np.sqrt([row["access_us_variance"] for row in buckets])
        axes.bar(middles, update, 0.6, color=COOL, label="update")
        axes.bar(middles, read, 0.6, bottom=update, color=WARM, label="read (attention)")
        axes.errorbar(middles, update + read, deviation, fmt="none", ecolor=INK, elinewidth=1, capsize=4)
        axes.set_xticks(
            middles,
            [f"{row['position_from']}\N{EN DASH}{row['position_to'] - 1}\n{row['timings']} timings" for row in buckets],
        )
        axes.set_xlim(-0.6, max(len(buckets), 3) - 0.4)  # one bar alone would fill the plot
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.grid(axis="x", visible=False)
        axes.legend(fontsize=8, loc="upper right")
        return inline_svg(figure, "cost")


def coefficient_front(rows: list[dict[str, Any]]) -> str:
    """Every candidate by its two aims, the front through those that nothing beats, the chosen one named."""
    front = sorted((row["latency_correlation"], row["importance_correlation"]) for row in rows if row["on_front"])
    (chosen,) = (row for row in rows if row["chosen"])
    at = chosen["latency_correlation"], chosen["importance_correlation"]
    with mpl.rc_context(STYLE):
        figure, axes = new_axes("rank correlation with time", "rank correlation with entropy")
        axes.scatter(
            [row["latency_correlation"] for row in rows], [row["importance_correlation"] for row in rows],
            color=FAINT, s=14, label="candidate",
        )  # fmt: skip
        axes.plot(*zip(*front, strict=True), color=GOOD, marker="o", markersize=4, label="nothing is better in both")
        mixture = "attention {alpha:.2g}, FFN {beta:.2g}, cost {gamma:.2g}".format(**chosen)
        axes.scatter(*at, color=WARM, s=70, zorder=4, label=f"chosen: {mixture}")
        axes.margins(0.12)
        figure.legend(fontsize=8, loc="outside upper left")
        return inline_svg(figure, "front")


def power_of_a_trace(power: list[float], first: int, prompt_tokens: int) -> str:
    """P of one trace by position, and where its answer begins."""
    with mpl.rc_context(STYLE):
        figure, axes = new_axes("position in the sequence", "share of the sequence's power, %")
        positions, shares = np.arange(first, len(power)), 100 * np.array(power[first:])
        axes.fill_between(positions, shares, color=GOOD, alpha=0.25, linewidth=0)
        axes.plot(positions, shares, color=GOOD, linewidth=1.2)
        axes.axvline(prompt_tokens - 0.5, color=FAINT, linewidth=1, linestyle="--")
        axes.annotate(
            "the answer", (prompt_tokens - 0.5, 1), (4, -4), xycoords=("data", "axes fraction"),
            textcoords="offset points", va="top", color="#6b7280", fontsize=8,
        )  # fmt: skip
        axes.set_ylim(bottom=0)
        return inline_svg(figure, "power")


def _plain(bar: Any) -> None:
    """A colour bar without a frame, drawn as shapes: a picture within the page is what its policy forbids."""
    bar.outline.set_visible(False)
    bar.solids.set_rasterized(False)
    bar.solids.set_edgecolor("face")  # else the page shows through between two shades


def _layer_ticks(axes: Any, layers: list[int], offset: float) -> None:
    step = max(1, -(-len(layers) // 8))
    axes.set_yticks(np.arange(0, len(layers), step) + offset, layers[::step])


def _stretch(first: int, end: int) -> str:
    if end == WIDEST:
        return f"{first}+"
    return str(first) if end == first + 1 else f"{first}\N{EN DASH}{end - 1}"
