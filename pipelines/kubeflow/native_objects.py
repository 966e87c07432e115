"""A pipeline as objects of Kubernetes, for installations of KFP that keep pipelines there: applied by kubectl.

kfp's compiler writes such objects too, from its own pipeline. Here they are made from the text that `reflux compile`
gives and `reflux submit` uploads, so that there is one specification, whichever way it is registered.
"""

from __future__ import annotations

from typing import Any

import yaml

from reflux.pipelines.kubeflow import registration
from reflux.pipelines.kubeflow.package import Package

API_VERSION = "pipelines.kubeflow.org/v2beta1"


def to_yaml(package: Package, *, pipeline: str, namespace: str = "") -> str:
    """A Pipeline and its PipelineVersion, as YAML. "" leaves the namespace to kubectl. ValueError for a wrong name.

    KFP refuses a change of a version's specification, and the version is named by the text's digest: applying the same
    text twice changes nothing, another text is another object.
    """
    if namespace:
        registration.check_name("--namespace", namespace)
    spec, *platform = yaml.safe_load_all(package.text)
    version = registration.version_name(pipeline, package)
    objects = [
        _object("Pipeline", pipeline, namespace, {"displayName": pipeline}),
        _object(
            "PipelineVersion",
            version,
            namespace,
            {"displayName": version, "pipelineName": pipeline, "pipelineSpec": spec}
            | ({"platformSpec": platform[0]} if platform else {}),
        ),
    ]
    return yaml.safe_dump_all(objects, sort_keys=True, allow_unicode=True)


def _object(kind: str, name: str, namespace: str, spec: dict[str, Any]) -> dict[str, Any]:
    place = {"namespace": namespace} if namespace else {}
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name, **place}, "spec": spec}
