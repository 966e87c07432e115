"""A pipeline as the YAML text that KFP loads. Equal recipes give equal bytes, so a diff shows what changed in a run.

What leaves for a cluster goes through `compile_recipe`, which refuses what no cluster can run. Run as a program, this
module compiles what stdin describes: so a second process, with another order of sets and dicts, can be compared.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from reflux.pipelines import ir_lint, recipes
from reflux.pipelines.distillation import distillation
from reflux.pipelines.form import with_default


def compile_to_text(pipeline: Any) -> str:
    """The intermediate representation of a KFP pipeline (what `distillation(recipe)` returns)."""
    from kfp.compiler import Compiler

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pipeline.yaml"
        Compiler().compile(pipeline, str(path))
        return path.read_text(encoding="utf-8")


def compile_recipe(
    name: str, recipe: recipes.Recipe, *, image: str = "", store: str = "", require_digests: bool = False
) -> str:
    """The specification of a recipe, for a cluster.

    `store` is the default of the form's field of that name; "" leaves it to whoever starts a run. ValueError with all
    that `ir_lint` finds, or if a second process makes other bytes of the same recipe.
    """
    asked = {"name": name, "configs": {stage: asdict(config) for stage, config in recipe.stages().items()}}
    asked |= {"kubernetes": {task: asdict(pod) for task, pod in recipe.kubernetes.items()}}
    asked |= {"image": image, "store": store}
    text = _text(asked)
    if findings := ir_lint.lint(text, require_digests=require_digests):
        raise ValueError("\n".join(["a cluster cannot run this specification:", *map(str, findings)]))
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    again = subprocess.run(
        [sys.executable, "-m", "reflux.pipelines.compile"],
        input=json.dumps(asked), env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    require_equal(text, again)
    return text


def require_equal(text: str, again: str) -> None:
    """ValueError, naming the first line that differs, unless two processes made the same bytes."""
    if again != text:
        pairs = enumerate(zip(text.splitlines(), again.splitlines(), strict=False), start=1)
        number, (one, other) = next(((n, pair) for n, pair in pairs if pair[0] != pair[1]), (0, ("", "")))
        raise ValueError(
            f"two processes compile different bytes; line {number} is {one.strip()!r} in one and {other.strip()!r} in "
            "the other; something is taken from a set, the clock or the environment"
        )


def _text(asked: dict[str, Any]) -> str:
    recipe = recipes.from_json(asked["configs"], asked["kubernetes"])
    pipeline = distillation(recipe, asked["image"], name=asked["name"])
    return compile_to_text(with_default(pipeline, "store", asked["store"]) if asked["store"] else pipeline)


if __name__ == "__main__":
    sys.stdout.write(_text(json.load(sys.stdin)))
