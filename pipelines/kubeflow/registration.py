"""What must stand on the server before a run can: the pipeline, a version of it with these bytes, the experiment.

A version is named after its pipeline and the sha256 of its text, so registering the same recipe twice changes nothing,
and a name never stands for two contents. The pipeline's name is part of it because Kubernetes, where pipelines can be
kept as objects, knows one object of a name in a namespace.
"""

from __future__ import annotations

import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfp_server_api import V2beta1Experiment, V2beta1Pipeline

from reflux.pipelines.kubeflow import kfp_api
from reflux.pipelines.kubeflow.kfp_api import Api
from reflux.pipelines.kubeflow.package import Package

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LONGEST_NAME = 63
_DIGEST_CHARACTERS = 12


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Ids on the server. In a dry run, what is not there yet has a text in angle brackets instead."""

    pipeline_id: str
    version_id: str
    experiment_id: str


def prepare(api: Api, *, pipeline: str, package: Package, experiment: str, latest: bool = False) -> Standing:
    """Find all three, then make what is missing. With `latest` the version is the pipeline's newest afterwards."""
    experiment_id = find_experiment(api, experiment)
    pipeline_id, version_id = register(api, pipeline=pipeline, package=package, latest=latest)
    return Standing(
        pipeline_id=pipeline_id,
        version_id=version_id,
        experiment_id=experiment_id or create_experiment(api, experiment),
    )


def register(api: Api, *, pipeline: str, package: Package, latest: bool = False) -> tuple[str, str]:
    """The ids of the pipeline and of its version with these bytes, made if they are not there; `latest` as above."""
    stem = version_name(pipeline, package)
    pipeline_id = find_pipeline(api, pipeline)
    version_id, name = _find_version(api, pipeline_id, stem, latest) if pipeline_id else ("", stem)
    pipeline_id = pipeline_id or _create_pipeline(api, pipeline)
    return pipeline_id, version_id or _upload(api, pipeline_id, name, package)


def pipeline_name(recipe: str, given: str = "") -> str:
    """The name of a recipe's pipeline, unless another is given. ValueError if Kubernetes would not take it."""
    return check_name("--pipeline", given or f"reflux-{recipe.replace('_', '-')}")


def version_name(pipeline: str, package: Package) -> str:
    """The name of the version that has these bytes."""
    return f"{check_name('--pipeline', pipeline)}-{package.digest[:_DIGEST_CHARACTERS]}"


def check_name(field: str, name: str) -> str:
    """The name, if Kubernetes would take it for an object. ValueError names the field."""
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise ValueError(
            f"{field} {name!r}: use up to {_LONGEST_NAME} small letters, digits and -, beginning and ending with no -"
        )
    return name


def find_pipeline(api: Api, name: str) -> str:
    """The pipeline's id, "" if there is none."""
    return _found(api, "pipeline", api.client.pipelines.pipeline_service_list_pipelines, name)


def newest_version(api: Api, pipeline_id: str) -> Any:
    """The version that a schedule by pipeline id runs, None if the pipeline has none."""
    method = api.client.pipelines.pipeline_service_list_pipeline_versions
    page = kfp_api.call(api, method, pipeline_id=pipeline_id, page_size=1, sort_by="created_at desc")
    return page.pipeline_versions[0] if page.pipeline_versions else None


def find_experiment(api: Api, name: str) -> str:
    """The experiment's id, "" if there is none."""
    return _found(api, "experiment", api.client.experiments.experiment_service_list_experiments, name)


def create_experiment(api: Api, name: str) -> str:
    """Its id."""
    body = V2beta1Experiment(display_name=name, namespace=api.namespace or None)
    method = api.client.experiments.experiment_service_create_experiment
    made = kfp_api.change(api, f"create experiment {name}", method, experiment=body)
    return made.experiment_id if made else f"<experiment {name}>"


def _find_version(api: Api, pipeline_id: str, stem: str, latest: bool) -> tuple[str, str]:
    """The id and name of the version with these bytes; "" and a free name where one has to be uploaded."""
    method = api.client.pipelines.pipeline_service_list_pipeline_versions
    filtered = kfp_api.equals("display_name", stem)
    same = list(kfp_api.every(api, method, "pipeline_versions", pipeline_id=pipeline_id, filter=filtered))
    if not same:
        return "", stem
    if latest:
        newest = newest_version(api, pipeline_id)
        if newest.display_name.startswith(stem):
            return newest.pipeline_version_id, newest.display_name
        return "", f"{stem}-{time.strftime('%Y%m%d%H%M%S', time.gmtime())}"  # back to bytes that were there before
    return same[0].pipeline_version_id, stem


def _upload(api: Api, pipeline_id: str, name: str, package: Package) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "pipeline.yaml")
        path.write_text(package.text, encoding="utf-8")
        made = kfp_api.change(
            api,
            f"upload version {name} ({len(package.text.encode()) / 1000:.0f} kB)",
            api.client.pipeline_uploads.upload_pipeline_version,
            uploadfile=str(path),
            name=name,
            pipelineid=pipeline_id,
        )
    return made.pipeline_version_id if made else f"<version {name}>"


def _found(api: Api, kind: str, method: Any, name: str) -> str:
    """The id of what has that name, "" if nothing has."""
    named = kfp_api.equals("display_name", name)
    listed = kfp_api.every(api, method, f"{kind}s", filter=named, **kfp_api.in_namespace(api))
    return _only(kind, name, [getattr(found, f"{kind}_id") for found in listed])


def _only(kind: str, name: str, ids: list[str]) -> str:
    if len(ids) > 1:
        raise ValueError(f"{kind} {name!r}: there are {len(ids)} of that name; delete or rename all but one")
    return ids[0] if ids else ""


def _create_pipeline(api: Api, name: str) -> str:
    body = V2beta1Pipeline(display_name=name, namespace=api.namespace or None)
    made = kfp_api.change(
        api, f"create pipeline {name}", api.client.pipelines.pipeline_service_create_pipeline, pipeline=body
    )
    return made.pipeline_id if made else f"<pipeline {name}>"
