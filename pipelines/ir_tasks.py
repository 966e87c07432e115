"""A compiled specification as its tasks: read from text, and refused where it is none.

A null counts as a field that is not there, as it does to KFP.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task of the graph, with what it refers to."""

    path: str
    spec: dict[str, Any]
    component: dict[str, Any]
    executor: dict[str, Any] | None
    """None for a group of tasks: a loop, a branch, a pipeline inside the pipeline."""

    def constants(self) -> dict[str, Any]:
        """Input -> the value that was compiled in."""
        inputs = self.spec.get("inputs", {}).get("parameters", {})
        values = {name: given.get("runtimeValue", {}) for name, given in inputs.items()}
        return {name: value["constant"] for name, value in values.items() if "constant" in value}


def specifications(text: str) -> list[dict[str, Any]]:
    """Those in YAML or JSON, also inside PipelineVersions. ValueError if there is none, or one is not as KFP has it."""
    try:
        documents = [document for document in yaml.safe_load_all(text) if isinstance(document, dict)]
    except yaml.YAMLError as error:
        raise ValueError(f"not a KFP specification: not valid YAML ({' '.join(str(error).split())})") from None
    inner = [_inside(_without_nulls(document)) for document in documents]
    found = [each for each in inner if all(isinstance(each.get(key), dict) for key in ("root", "deploymentSpec"))]
    if not found:
        raise ValueError("not a KFP specification: no document in it has root and deploymentSpec")
    for spec in found:
        _require_kfps_types(spec)
    return found


def _without_nulls(value: Any) -> Any:
    """The same without fields that are null: to KFP they are not there."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _inside(document: dict[str, Any]) -> dict[str, Any]:
    """What a PipelineVersion holds; anything else as it is."""
    spec = document.get("spec")
    inner = spec.get("pipelineSpec") if isinstance(spec, dict) else None
    return inner if isinstance(inner, dict) else document


def _require_kfps_types(spec: dict[str, Any]) -> None:
    """ValueError unless everything that KFP knows has KFP's type; other fields may be of a newer version."""
    try:
        json_format.ParseDict(spec, pipeline_spec_pb2.PipelineSpec(), ignore_unknown_fields=True)
        deployment = pipeline_spec_pb2.PipelineDeploymentConfig()
        json_format.ParseDict(spec["deploymentSpec"], deployment, ignore_unknown_fields=True)
    except json_format.ParseError as error:
        raise ValueError(f"not a KFP specification: {' '.join(str(error).split())}") from None


def tasks(spec: dict[str, Any]) -> list[Task]:
    """All of a specification, those inside groups too. ValueError if one refers to what is not there."""
    return [*_tasks(spec, spec["root"])]


def _tasks(
    spec: dict[str, Any], component: dict[str, Any], path: str = "", above: tuple[str, ...] = ()
) -> Iterator[Task]:  # fmt: skip
    """The tasks of a component and of those inside it; `above` are the components that it is in."""
    components, executors = spec.get("components", {}), spec["deploymentSpec"].get("executors", {})
    for name, task in component.get("dag", {}).get("tasks", {}).items():
        called = task.get("componentRef", {}).get("name", "")
        inner = components.get(called)
        if inner is None or called in above:
            wrong = "is in itself" if called in above else "is not there"
            raise ValueError(f"not a KFP specification: component {called!r} of task {path}{name} {wrong}")
        label = inner.get("executorLabel")
        if label is not None and label not in executors:
            raise ValueError(f"not a KFP specification: executor {label!r} of task {path}{name} is not there")
        executor = executors[label] if label is not None else None
        yield Task(path=f"{path}{name}", spec=task, component=inner, executor=executor)
        yield from _tasks(spec, inner, f"{path}{name}/", (*above, called))
