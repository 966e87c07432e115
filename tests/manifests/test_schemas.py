"""Every object is one that Kubernetes would take, judged by its published schemas; those of KFP by a schema of ours."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kustomized import OVERLAYS, of_kind, overlay, secrets

from reflux.pipelines import recipes
from reflux.pipelines.compile import compile_to_text
from reflux.pipelines.distillation import distillation
from reflux.pipelines.kubeflow import native_objects
from reflux.pipelines.kubeflow.package import Package

KUBERNETES = "1.32"  # the oldest version that is asked for
CUSTOM = yaml.safe_load((Path(__file__).parents[1] / "data/crds/pipelines.kubeflow.org.yaml").read_text())


def check(found: dict[str, Any]) -> None:
    """ValidationError for a field that is unknown, missing or of another type; any kind must have a schema."""
    if found["apiVersion"] == native_objects.API_VERSION:
        jsonschema.validate(found, CUSTOM[found["kind"]])
    else:
        kubernetes_validate.validate(found, KUBERNETES, strict=True)


REFUSALS = (jsonschema.ValidationError, kubernetes_validate.ValidationError)


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay(name: str) -> None:
    found = overlay(name)
    assert len(found) >= 10
    for each in found:
        check(each)


def test_the_secrets(tmp_path: Path) -> None:
    found = secrets(tmp_path)
    assert [each["kind"] for each in found] == ["Secret", "Secret"]
    for each in found:
        check(each)


@pytest.fixture(scope="module")
def registered() -> list[dict[str, Any]]:
    """The objects of the demo's pipeline."""
    text = compile_to_text(distillation(recipes.demo(), name="demo"))
    return list(yaml.safe_load_all(native_objects.to_yaml(Package(text=text), pipeline="reflux-demo", namespace="n")))


def test_a_registered_pipeline(registered: list[dict[str, Any]]) -> None:
    found = registered
    assert [each["kind"] for each in found] == ["Pipeline", "PipelineVersion"]
    for each in found:
        check(each)


def wrong(found: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The object with one value changed, or one name if the value is None."""
    changed = copy.deepcopy(found)
    *folders, last = path.split(".")
    place: Any = changed
    for folder in folders:
        place = place[int(folder) if folder.isdigit() else folder]
    if value is None:
        place[f"{last}x"] = place.pop(last)
    else:
        place[last] = value
    return changed


@pytest.mark.parametrize(
    ("kind", "name", "path", "value"),
    [
        ("Deployment", "mlflow", "spec.replicas", "one"),
        ("Deployment", "mlflow", "spec.template.spec.containers.0.readinessProbe", None),
        ("Deployment", "mlflow", "spec.template.spec.securityContext.runAsNonRoot", None),
        ("StatefulSet", "postgres", "spec.volumeClaimTemplates.0.spec.accessModes", "ReadWriteOnce"),
        ("NetworkPolicy", "mlflow", "spec.ingress.0.from.0.podSelector", None),
        ("Role", "reflux-runner", "rules.0.verbs", None),
        ("Job", "reflux-register", "spec.backoffLimit", None),
        ("ConfigMap", "reflux-settings", "data.AWS_REGION", 1),
    ],
)
def test_a_wrong_field_is_found(kind: str, name: str, path: str, value: Any) -> None:
    good = of_kind(overlay("local"), kind)[name]
    check(good)
    with pytest.raises(REFUSALS):
        check(wrong(good, path, value))


@pytest.mark.parametrize("path", ["spec.pipelineSpec", "spec.pipelineName", "spec.displayName", "metadata.name"])
def test_a_wrong_field_of_a_version_is_found(registered: list[dict[str, Any]], path: str) -> None:
    with pytest.raises(REFUSALS):
        check(wrong(registered[1], path, None))


def test_a_kind_without_a_schema_is_no_success() -> None:
    with pytest.raises(kubernetes_validate.SchemaNotFoundError):
        check({"apiVersion": "example.org/v1", "kind": "Teapot", "metadata": {"name": "t"}})
