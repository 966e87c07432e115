"""What Kubeflow Pipelines' MLflow plugin does around a pipeline's tasks, step by step as its sources have it (2.17)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

JOB = "3f2b8c1e-5a77-4d0e-9b42-0c6d1f7a9e55"


def api_server_creates_the_run(client: Any, *, job: str = JOB, experiment: str = "KFP-Default") -> Any:
    """The parent, before any pod exists."""
    known = client.get_experiment_by_name(experiment)
    # MLflow takes the working directory otherwise
    pages = Path(client.tracking_uri.removeprefix("sqlite:///")).with_name("pages").as_uri()
    place = known.experiment_id if known else client.create_experiment(experiment, artifact_location=pages)
    tags = {
        "kfp.pipeline_run_id": job,
        "kfp.pipeline_run_url": f"https://kubeflow.example/#/runs/details/{job}",
        "kfp.pipeline_id": "p1",
        "kfp.pipeline_version_id": "v1",
        "mlflow.kfp.idempotencyKey": f"run-{job}",
    }
    return client.create_run(place, run_name="tea party 7", tags=tags)


def driver_starts_a_task(client: Any, parent: Any, task: str) -> Any:
    """The nested run of a container task, or of a loop: its name is the task's, and nothing else tells what it is."""
    return client.create_run(parent.info.experiment_id, run_name=task, tags={"mlflow.parentRunId": parent.info.run_id})


def environment(nested: Any, tracking_uri: str) -> dict[str, str]:
    """What `injectUserEnvVars: true` puts into the container."""
    return {
        "MLFLOW_RUN_ID": nested.info.run_id,
        "MLFLOW_TRACKING_URI": tracking_uri,
        "MLFLOW_EXPERIMENT_ID": nested.info.experiment_id,
    }


def launcher_ends_a_task(
    client: Any, nested: Any, parameters: Mapping[str, Any], metrics: Mapping[str, float], status: str
) -> None:
    """Inputs as JSON texts and the numbers of system.Metrics artifacts, in one batch; then the end."""
    from mlflow.entities import Metric, Param

    client.log_batch(
        nested.info.run_id,
        params=[Param(name, json.dumps(value)) for name, value in parameters.items()],
        metrics=[Metric(name, value, 0, 0) for name, value in metrics.items()],
    )
    client.set_terminated(nested.info.run_id, status=status)


def api_server_ends_the_run(client: Any, parent: Any, status: str) -> None:
    client.set_terminated(parent.info.run_id, status=status)
