"""What a stage of ours makes by its `run`, in this process, for benchmarks that need an artifact and no pipeline."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from reflux.components import declare, sources
from reflux.components.artifacts import Artifact, Writer
from reflux.components.storage import Store


def made(folder: Path, stage: str, config: Any, *, output: str, **parents: Artifact) -> Artifact:
    """The stage's artifact in a store below `folder`; `output` is the name of its writer in `run`."""
    part = importlib.import_module(f"reflux.components.{stage}.config")
    writer = Writer(
        Store.open(str(folder / "store")), stage=stage, version=part.STAGE_VERSION,
        key_fields=declare.hashed_fields(config), other_fields=declare.other_fields(config), parents=parents,
        sources={field: sources.resolve(field, uri) for field, uri in declare.source_fields(config).items()},
    )  # fmt: skip
    run_stage = importlib.import_module(f"reflux.components.{stage}.stage").run
    return writer.commit(run_stage(config, **parents, **{output: writer}))
