"""Writes a page."""

from __future__ import annotations

from reflux.components.artifacts import Artifact, Writer
from toy_stages.pour.config import PourConfig


def run(config: PourConfig, *, tea: Artifact, cup: Writer) -> dict[str, float]:
    cup.write_file("report.html", b"<p>" + tea.file("tea.txt") + b"</p>")
    return {"poured": float(config.cups), "verdict.pass": float(config.sweet)}
