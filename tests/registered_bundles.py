"""Bundles with evaluations, registered as a pipeline's last stage does it, made by writers instead of by models."""

from __future__ import annotations

import json
from typing import Any

from reflux.components import registry, tracking
from reflux.components.artifacts import Artifact, Writer
from reflux.components.registry import Version
from reflux.components.storage import Store

MODEL = "student"
TEXT = {"name": "book", "sha256": "ab", "windows": 8, "window_tokens": 512}


def register(store: Store, *, perplexity: float, verdict: str = "pass", **summary: Any) -> Version:
    """A version of MODEL. Another perplexity is another bundle."""
    made = _artifact(store, "collect_traces", {}, {"answers.txt": b"four"})
    bundle = _artifact(store, "calibrate", {"traces": made}, {"model.safetensors": str(perplexity).encode()})
    content = {
        "verdict": verdict,
        "table": [
            {"scheme": "fp32", "role": "full", "perplexity": 20.0, "pmr": 1.0},
            {"scheme": "w4a4_dual", "role": "distilled", "perplexity": perplexity, "pmr": 0.9},
        ],
        "text": TEXT,
        "heldout": {"traces": 20, "tokens": 900},
        "parents": {"traces": made.digest},
        "sources": {"teacher": "sha256:cd"},
        **summary,
    }
    scores = _artifact(
        store, "evaluate", {"bundle": bundle, "traces": made}, {"metrics.json": json.dumps(content).encode()}
    )
    at: dict[str, Any] = {"params": {}, "parents": {}, "sources": {}, "store": store}
    with tracking.stage_run("evaluate", f"run-{perplexity}", key=scores.key, **at) as tracked:
        assert tracked is not None
        return registry.register(MODEL, bundle=bundle, scores=scores, run=f"run-{perplexity}", tracked=tracked)


def _artifact(store: Store, stage: str, parents: dict[str, Artifact], files: dict[str, bytes]) -> Artifact:
    contents = {name: data.decode() for name, data in files.items()}
    writer = Writer(store, stage=stage, version="1", key_fields=contents, other_fields={}, parents=parents, sources={})
    known = writer.existing()
    if known is not None:
        return known
    for name, data in files.items():
        writer.write_file(name, data)
    return writer.commit({})
