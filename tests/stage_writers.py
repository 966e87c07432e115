"""A writer for a stage in a store of the test's own, as the entry point would make it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from reflux.components import declare, sources
from reflux.components.artifacts import Artifact, Writer
from reflux.components.storage import Store


def writer_for(folder: Path, stage: str, config: Any, **parents: Artifact) -> Writer:
    module = importlib.import_module(f"reflux.components.{stage}.config")
    return Writer(
        Store.open(str(folder)),
        stage=stage,
        version=module.STAGE_VERSION,
        key_fields=declare.hashed_fields(config),
        other_fields=declare.other_fields(config),
        parents=parents,
        sources={field: sources.resolve(field, uri) for field, uri in declare.source_fields(config).items()},
    )
