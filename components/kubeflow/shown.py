"""What KFP's UI shows of a stage, all of it made of the artifact's manifest: numbers, and a page in Markdown.

They are no part of the artifact: KFP shows their bytes, so a cluster's launcher copies them as they are.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from reflux.components.artifacts import Artifact

_LONGEST = 300  # characters of one cell


def numbers(artifact: Artifact) -> dict[str, float]:
    """The metadata of a system.Metrics artifact: flat, and finite, because JSON has no other numbers."""
    return {name: float(value) for name, value in artifact.metrics.items() if math.isfinite(value)}


def metrics_file(artifact: Artifact) -> bytes:
    """The same as a file, for those who download the artifact."""
    return json.dumps(numbers(artifact), indent=2, sort_keys=True).encode()


def summary(artifact: Artifact, *, reused: bool, links: Mapping[str, str]) -> str:
    """The page: what came out, what it was made from, how it was configured, what it holds; `links` lead elsewhere."""
    record = artifact.record
    known_as = {"digest": artifact.digest, "in the store": artifact.uri}
    known_as |= {name.replace("_", " "): value for name, value in links.items()}
    if "verdict.pass" in artifact.metrics:
        known_as["verdict"] = "pass" if artifact.metrics["verdict.pass"] else "fail"
    parents = [(name, parent.stage, parent.digest) for name, parent in record.parents.items()]
    sources = [(name, source.uri, source.digest) for name, source in record.sources.items()]
    parts = [
        f"# {artifact.stage}: {'found in the store, not made again' if reused else 'made'}",
        _table(("", ""), known_as.items()),
        "## Numbers",
        _table(("metric", "value"), ((name, f"{value:.6g}") for name, value in sorted(artifact.metrics.items()))),
        "## Made from",
        _table(("input", "what", "digest"), [*parents, *sources]),
        "## Holds",
        _table(("name", "files", "rows", "bytes"), _contents(artifact)),
        "## Configuration",
        _table(("field", "value"), sorted(artifact.config.items())),
    ]
    return "\n\n".join(parts) + "\n"


def _contents(artifact: Artifact) -> list[tuple[str, int, int | str, int]]:
    """Shards, those of one table together: `traces/00000` and those after it are `traces`."""
    found: dict[str, list[Any]] = {}
    for shard in artifact.record.shards:
        found.setdefault(shard.name.partition("/")[0], []).append(shard)
    return [
        (name, len(shards), sum(shard.rows or 0 for shard in shards) or "", sum(shard.bytes for shard in shards))
        for name, shards in found.items()
    ]


def _table(head: tuple[str, ...], rows: Iterable[Iterable[Any]]) -> str:
    lines = [f"| {' | '.join(_cell(value) for value in row)} |" for row in rows]
    if not lines:
        return "nothing"
    return "\n".join([f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *lines])


def _cell(value: Any) -> str:
    """A web address as a link, all else as code: names come from other people, and Markdown would read them."""
    text = " ".join(str(value).split())
    if re.fullmatch(r"https?://[^\s<>|]+", text):
        return f"<{text}>"
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return f"`{text.replace('`', chr(39)).replace('|', chr(92) + '|')}`" if text else ""
