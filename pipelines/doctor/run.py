"""Why a loss does not fall: what is known to go wrong in low-bit distillation, looked for in what a run left.

In this order: data, quantisation, policy, hardware; then whether its bundle answers alike. A stopped run is looked at
as far as it came, its training at the last checkpoint.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from reflux.components.algorithms.low_bit import site_modules
from reflux.components.bundles.bundle import load_bundle
from reflux.pipelines import runs
from reflux.pipelines.doctor import data, hardware, policy, quantisation
from reflux.pipelines.doctor.determinism import determinism
from reflux.pipelines.doctor.evidence import Evidence, gather, student_of
from reflux.pipelines.doctor.finding import Finding, attempted
from reflux.pipelines.store import stores

PROBED_TOKENS = 64
"""Of the first trace, which the student and the bundle are asked."""


def examine(folder: Path, ref: stores.StoreRef | None = None) -> Iterator[Finding]:
    """The findings on the run in `folder`, one by one. `ref` replaces the store that it records. ValueError where the
    run cannot be read at all.
    """
    record = runs.read(folder)
    with stores.opened(ref or record.store) as (store, _), tempfile.TemporaryDirectory() as scratch:
        evidence = gather(record, store, Path(scratch))
        for name, check in checks(evidence, Path(scratch)).items():
            yield attempted(name, check)


def checks(evidence: Evidence, scratch: Path) -> dict[str, Callable[[], Finding]]:
    """Name -> check, in order."""
    student = cache(lambda: student_of(evidence))

    def tokens() -> list[int]:
        return evidence.token_ids(PROBED_TOKENS)

    return {
        "tokens": lambda: data.tokens(evidence),
        "sequences": lambda: data.sequences(evidence),
        "loss": lambda: data.loss(evidence),
        "teacher": lambda: data.teacher(evidence),
        "observers": lambda: quantisation.observers(
            evidence.artifact("profile_kv"), [*site_modules(student())], evidence.config.max_sequence_tokens
        ),
        "rounding": lambda: quantisation.rounding(student(), tokens()),
        "rope": lambda: quantisation.rope(student()),
        "saturation": lambda: policy.saturation(evidence.table or evidence.profiled, evidence.profiled),
        "movement": lambda: policy.movement(evidence),
        "warm-up": lambda: policy.warmup(evidence),
        "driver": hardware.driver_here,
        "gpu memory": lambda: hardware.memory_of(evidence.made.get("distill")),
        "CUDA graphs": hardware.graphs,
        "determinism": lambda: determinism(_bundle(evidence, scratch), tokens()),
    }


def _bundle(evidence: Evidence, scratch: Path) -> Any:
    evidence.artifact("calibrate").download_all("", scratch / "bundle")
    return load_bundle(scratch / "bundle")
