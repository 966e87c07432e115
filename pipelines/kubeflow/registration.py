"""What must stand on the server before a run can: the pipeline, a version of it with these bytes, the experiment.

A version is named after its pipeline and the sha256 of its text, so registering the same recipe twice changes nothing,
and a name never stands for two contents. The pipeline's name is part of it because Kubernetes, where pipelines can be
kept as objects, knows one object of a name in a namespace.

The newest version of a pipeline is what schedules run. So the pipeline of a schedule by recipe says in its description
that it is one, and only its schedule adds versions to it. Two commands at once may find the same thing missing: the one
that is refused, because it is there by then, goes on with what the other made.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfp_server_api import V2beta1Experiment, V2beta1Pipeline

from reflux.pipelines.kubeflow import kfp_api
from reflux.pipelines.kubeflow.kfp_api import Api
from reflux.pipelines.kubeflow.package import Package

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LONGEST_NAME = 63
_TAKEN = 409
_DIGEST_CHARACTERS = 12
_OF_A_SCHEDULE = "[reflux pipeline of the schedule of this name]"


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Ids on the server. In a dry run, what is not there yet has a text in angle brackets instead."""

    pipeline_id: str
    version_id: str
    experiment_id: str


def prepare(
    api: Api, *, pipeline: str, package: Package, experiment: str, latest: bool = False, scheduled: bool = False
) -> Standing:  # fmt: skip
    """Find all three, then make what is missing; arguments and errors as in `register`."""
    experiment_id = find_experiment(api, experiment)
    pipeline_id, version_id = register(api, pipeline=pipeline, package=package, latest=latest, scheduled=scheduled)
    return Standing(
        pipeline_id=pipeline_id,
        version_id=version_id,
        experiment_id=experiment_id or create_experiment(api, experiment),
    )


def register(
    api: Api, *, pipeline: str, package: Package, latest: bool = False, scheduled: bool = False
) -> tuple[str, str]:  # fmt: skip
    """The ids of the pipeline and of its version with these bytes, made if they are not there.

    With `latest` the version is the pipeline's newest afterwards. `scheduled` is for the schedule of the pipeline's
    name. ValueError for somebody else's pipeline, as in `find_own`.
    """
    stem = version_name(pipeline, package)
    pipeline_id = find_own(api, pipeline, scheduled=scheduled)
    version_id, name = _find_version(api, pipeline_id, stem, latest) if pipeline_id else ("", stem)
    pipeline_id = pipeline_id or _made_or_found(
        lambda: _create_pipeline(api, pipeline, scheduled), lambda: find_own(api, pipeline, scheduled=scheduled)
    )
    version_id = version_id or _made_or_found(
        lambda: _upload(api, pipeline_id, name, package), lambda: _find_version(api, pipeline_id, name, latest)[0]
    )
    return pipeline_id, version_id


def find_own(api: Api, name: str, *, scheduled: bool) -> str:
    """The id of a pipeline that a version may be added to, "" if there is none. ValueError if the new version would be
    what somebody else runs: `scheduled` adds to the pipeline that the schedule of this name made, others to none such.
    """
    found = _pipeline(api, name)
    if found is None:
        return ""
    is_a_schedules = (found.description or "").endswith(_OF_A_SCHEDULE)
    if scheduled and not is_a_schedules:
        raise ValueError(
            f"pipeline {name!r}: is there, and no schedule made it, so a version for the schedule {name} could change "
            f"what others run; give the schedule another name, or let it run that pipeline by `pipeline: {name}`"
        )
    if is_a_schedules and not scheduled:
        raise ValueError(
            f"pipeline {name!r}: belongs to the schedule {name}, which would run the new version; name another one"
        )
    return str(found.pipeline_id)


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
    found = _pipeline(api, name)
    return found.pipeline_id if found else ""


def newest_version(api: Api, pipeline_id: str) -> Any:
    """The version that a schedule by pipeline id runs, None if the pipeline has none."""
    method = api.client.pipelines.pipeline_service_list_pipeline_versions
    page = kfp_api.call(api, method, pipeline_id=pipeline_id, page_size=1, sort_by="created_at desc")
    return page.pipeline_versions[0] if page.pipeline_versions else None


def find_experiment(api: Api, name: str) -> str:
    """The experiment's id, "" if there is none."""
    found = _found(api, "experiment", api.client.experiments.experiment_service_list_experiments, name)
    return found.experiment_id if found else ""


def create_experiment(api: Api, name: str) -> str:
    """Its id."""
    body = V2beta1Experiment(display_name=name, namespace=api.namespace or None)
    method = api.client.experiments.experiment_service_create_experiment

    def create() -> str:
        made = kfp_api.change(api, f"create experiment {name}", method, experiment=body)
        return made.experiment_id if made else f"<experiment {name}>"

    return _made_or_found(create, lambda: find_experiment(api, name))


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


def _pipeline(api: Api, name: str) -> Any:
    return _found(api, "pipeline", api.client.pipelines.pipeline_service_list_pipelines, name)


def _found(api: Api, kind: str, method: Any, name: str) -> Any:
    """What has that name, None if nothing has. ValueError if several have."""
    named = kfp_api.equals("display_name", name)
    listed = [*kfp_api.every(api, method, f"{kind}s", filter=named, **kfp_api.in_namespace(api))]
    if len(listed) > 1:
        raise ValueError(f"{kind} {name!r}: there are {len(listed)} of that name; delete or rename all but one")
    return listed[0] if listed else None


def _made_or_found(make: Callable[[], str], find: Callable[[], str]) -> str:
    """The id of what was made here, or of what another command made in this moment."""
    try:
        return make()
    except kfp_api.RefusedError as error:
        if error.status != _TAKEN or not (known := find()):
            raise
        return known


def _create_pipeline(api: Api, name: str, scheduled: bool) -> str:
    description = _OF_A_SCHEDULE if scheduled else None
    body = V2beta1Pipeline(display_name=name, description=description, namespace=api.namespace or None)
    made = kfp_api.change(
        api, f"create pipeline {name}", api.client.pipelines.pipeline_service_create_pipeline, pipeline=body
    )
    return made.pipeline_id if made else f"<pipeline {name}>"
