"""One run on a cluster: everything that can be wrong is found before anything is made, then the run is created.

The run is pinned to the version that was compiled here, so that what was asked for is what runs, whatever is uploaded
meanwhile. Versions of submitted runs are kept under a pipeline of their own, because the newest version of a pipeline
is what the UI offers and schedules run, and somebody's trial must not become that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kfp_server_api import V2beta1PipelineVersionReference, V2beta1Run, V2beta1RuntimeConfig

from reflux.components import run_tree
from reflux.pipelines.kubeflow import arguments, kfp_api, registration
from reflux.pipelines.kubeflow.kfp_api import Api
from reflux.pipelines.kubeflow.package import Package
from reflux.pipelines.recipes import Recipe

UI_VARIABLE = "KF_PIPELINES_UI_ENDPOINT"
"""kfp's own name for the address that people open, where it is not that of the API."""

RUN_INPUT = "run"
"""The pipeline's input that names the run in MLflow and in the store's records."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A run as it is asked for. "" leaves pipeline root and service account to the server."""

    package: Package
    pipeline: str
    name: str
    values: dict[str, Any]
    experiment: str
    pipeline_root: str = ""
    service_account: str = ""


def asked(
    package: Package, *, recipe: str, config: Recipe | None, name: str, pipeline: str, experiment: str,
    texts: Iterable[str], pipeline_root: str, service_account: str,
) -> Asked:  # fmt: skip
    """Check everything that needs no server. ValueError names what is wrong and what is allowed.

    `recipe` is the name of `config`, which is None for a pipeline without overrides.
    """
    name = name or f"{recipe}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    values = arguments.parse(package.parameters, texts)
    if RUN_INPUT in package.parameters:
        run_tree.searchable(f"argument {RUN_INPUT}", values.setdefault(RUN_INPUT, name))
    values = arguments.check(package.parameters, values)
    if config is not None:
        arguments.check_overrides(config, values)
    return Asked(
        package=package,
        pipeline=registration.check_name("--pipeline", pipeline or f"{registration.pipeline_name(recipe)}-submitted"),
        name=name,
        values=values,
        experiment=experiment,
        pipeline_root=pipeline_root,
        service_account=service_account,
    )


def submit(api: Api, run: Asked) -> str:
    """Create the run, and before it what it needs. Its id; "" in a dry run."""
    standing = registration.prepare(api, pipeline=run.pipeline, package=run.package, experiment=run.experiment)
    body = V2beta1Run(
        display_name=run.name,
        experiment_id=standing.experiment_id,
        pipeline_version_reference=V2beta1PipelineVersionReference(
            pipeline_id=standing.pipeline_id, pipeline_version_id=standing.version_id
        ),
        runtime_config=V2beta1RuntimeConfig(parameters=run.values, pipeline_root=run.pipeline_root or None),
        service_account=run.service_account or None,
    )
    try:
        made = kfp_api.change(api, f"create run {run.name}", api.client.runs.run_service_create_run, run=body)
    except kfp_api.OutOfReachError as error:
        raise kfp_api.OutOfReachError(
            f"{error}; whether the run was made is not known: look for {run.name} in the experiment {run.experiment}"
        ) from error
    return made.run_id if made else ""


def page(api: Api, run_id: str) -> str:
    """The address of the run in the Pipelines UI, which usually is that of the API; "" from inside the cluster."""
    place = os.environ.get(UI_VARIABLE) or api.host
    return f"{place.rstrip('/')}/#/runs/details/{run_id}" if place.startswith("http") else ""
