"""The two toy stages as a pipeline, and a run of it on this machine."""

from pathlib import Path
from typing import Any

from kfp import dsl

from reflux.pipelines.compile import compile_to_text
from reflux.pipelines.machine.local_session import Runner, StageResult, run_pipeline
from reflux.pipelines.machine.process_runner import in_processes
from toy_stages.brew.component import brew
from toy_stages.brew.config import BrewConfig
from toy_stages.pour.component import pour
from toy_stages.pour.config import PourConfig


def tea_party(image: str = "", **values: Any) -> Any:
    @dsl.pipeline(name="tea-party")
    def pipeline(store: str, leaves: str, run: str = "", overrides: dict = {}) -> None:  # noqa: B006
        job = dsl.PIPELINE_JOB_ID_PLACEHOLDER
        at = {"store": store, "run": run, "job": job, "overrides": overrides, "image": image}
        tea = brew(BrewConfig(**values), leaves=leaves, **at).outputs["tea"]
        pour(PourConfig(), tea=tea, **at)

    return pipeline


def party(
    root: Path, *, runner: Runner | None = None, form: dict[str, Any] | None = None, **brew: Any
) -> dict[str, StageResult]:
    """`form`: parameters of the pipeline beside those that it needs."""
    leaves = root / "python3 leaves.txt"
    leaves.write_text("assam")
    arguments = {"store": str(root / "store"), "run": "r1", "leaves": str(leaves), **(form or {})}
    runner = runner or in_processes()
    return run_pipeline(compile_to_text(tea_party(**brew)), arguments, root=root / "kfp", runner=runner)
