"""A compiled pipeline as it is sent to a cluster, and what its own text says: inputs, tasks, digest.

What the cluster gets is this text and nothing else, so everything that is checked before sending is read from it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from reflux.pipelines.compile import compile_recipe
from reflux.pipelines.recipes import Recipe


@dataclass(frozen=True, kw_only=True)
class Package:
    """The YAML text of a pipeline. The second document of the text, if there is one, is for Kubernetes."""

    text: str

    @functools.cached_property
    def spec(self) -> dict[str, Any]:
        """KFP's pipeline specification."""
        first: dict[str, Any] = next(yaml.safe_load_all(self.text))
        return first

    @property
    def parameters(self) -> dict[str, dict[str, Any]]:
        """The inputs of the pipeline: name -> its definition."""
        return parameters(self.spec)

    @property
    def digest(self) -> str:
        """sha256 of the text, in hexadecimal digits: equal recipes compile to equal bytes."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def of_recipe(
    name: str, recipe: Recipe, *, image: str = "", store: str = "", require_digests: bool = False
) -> Package:  # fmt: skip
    """Compile. ValueError for what no cluster could run."""
    return Package(text=compile_recipe(name, recipe, image=image, store=store, require_digests=require_digests))


def unwrapped(told: Mapping[str, Any]) -> Mapping[str, Any]:
    """The specification in what the server tells of a version: settings for Kubernetes beside it make it wrapped."""
    spec: Mapping[str, Any] = told.get("pipeline_spec", told)
    return spec


def parameters(spec: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The inputs that a pipeline's specification declares."""
    found: dict[str, dict[str, Any]] = spec.get("root", {}).get("inputDefinitions", {}).get("parameters", {})
    return found


def tasks(spec: Mapping[str, Any]) -> set[str]:
    """The names of all tasks that have a container: those inside loops too, and no loop, condition or other bracket."""
    return set(_tasks(spec["root"], spec.get("components", {})))


def _tasks(component: Mapping[str, Any], components: Mapping[str, Any]) -> Iterator[str]:
    for name, task in component.get("dag", {}).get("tasks", {}).items():
        inside = components[task["componentRef"]["name"]]
        if "dag" in inside:
            yield from _tasks(inside, components)
        else:
            yield name
