"""The task after all others, however they ended: it says in MLflow how the run of the pipeline came out.

Without it the parent run of a pipeline that failed would stay RUNNING, for no other task runs after a failed one. It is
no stage: it makes no artifact and no run of its own in MLflow. `reflux run` closes its runs by itself, even after
Ctrl-C, when kfp.local starts no such task, and saves the seconds that this program takes to start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reflux.components import declare
from reflux.components.kubeflow import kfp_task

NAME = "close_run"
_ENDED = {
    "SUCCEEDED": "FINISHED",
    "COMPLETE": "FINISHED",  # KFP 2.17 hands over the words of its metadata store
    "CACHED": "FINISHED",
    "CANCELED": "KILLED",
    "CANCELLED": "KILLED",
}
"""KFP's state -> MLflow's status. Any other is decided from what the stages said: a run that was terminated is FAILED
to KFP, and one with a loop in it can still be called RUNNING when it is over (kubeflow/pipelines#13321)."""


def close_run(*, image: str = "", place: Any = None, **arguments: Any) -> Any:
    """KFP's task, inside a pipeline, for dsl.ExitHandler: its arguments are `run` and `job`."""
    from kfp import dsl

    component = kfp_task.component(
        NAME,
        [(name, str, kfp_task.REQUIRED) for name in ("run", "job")]
        + [("status", dsl.PipelineTaskFinalStatus, kfp_task.REQUIRED)],
        doc="Say in MLflow how the run ended.",
        image=declare.IMAGE,
    )
    return kfp_task.started(component, image, place, arguments)


def run(parameters: Mapping[str, Any]) -> None:
    """Close the parent run, and what a killed stage left open. ConnectionError if MLflow does not answer."""
    from reflux.components import mlflow_connection, tracking

    name, job = parameters["run"] or parameters["job"], parameters["job"]
    state = str((parameters.get("status") or {}).get("state", ""))
    if not mlflow_connection.enabled():
        print("tracking: off, because MLFLOW_TRACKING_URI is not set", flush=True)
        return
    status = _ENDED.get(state) or tracking.how_it_ended(name, job, failed=state == "FAILED")
    tracking.end_pipeline(name, status=status, job=job)
    print(f"run {name}: {status} (to Kubeflow {state or 'unknown'})", flush=True)
