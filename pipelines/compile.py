"""A pipeline as the YAML text that KFP loads. Equal recipes give equal bytes, so a diff shows what changed in a run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any


def compile_to_text(pipeline: Any) -> str:
    """The intermediate representation of a KFP pipeline (what `distillation(recipe)` returns)."""
    from kfp.compiler import Compiler

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pipeline.yaml"
        Compiler().compile(pipeline, str(path))
        return path.read_text(encoding="utf-8")
