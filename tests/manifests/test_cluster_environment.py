"""What a task of a compiled pipeline asks of its namespace is what the manifests put there, by name and key."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from kustomized import MANIFESTS, OVERLAYS, of_kind, overlay

from reflux.components.kubeflow import cluster_environment as asked
from reflux.pipelines import recipes
from reflux.pipelines.compile import compile_to_text
from reflux.pipelines.distillation import distillation


@pytest.fixture(scope="module")
def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(compile_to_text(distillation(recipes.demo(), name="demo"))))


def test_every_task_is_given_keys_and_addresses(documents: list[dict[str, Any]]) -> None:
    """Those at the beginning and at the end too, and by reference: no value is in the specification."""
    specification, platform = documents
    executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert executors.keys() == specification["deploymentSpec"]["executors"].keys()
    for executor in executors.values():
        (secret,), (settings,) = executor["secretAsEnv"], executor["configMapAsEnv"]
        assert (secret["secretName"], settings["configMapName"]) == (asked.KEYS, asked.SETTINGS)
        assert (secret["optional"], settings["optional"]) == (True, True)
        variables = {pair["secretKey"]: pair["envVar"] for pair in secret["keyToEnv"]}
        assert variables == {name: name for name in asked.KEYS_GIVE}
        variables = {pair["configMapKey"]: pair["envVar"] for pair in settings["keyToEnv"]}
        assert variables == {name: name for name in asked.SETTINGS_GIVE}


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_manifests_have_them(name: str) -> None:
    assert set(asked.SETTINGS_GIVE) <= of_kind(overlay(name), "ConfigMap")[asked.SETTINGS]["data"].keys()
    generators = yaml.safe_load((MANIFESTS / "secrets/kustomization.yaml").read_text())["secretGenerator"]
    (file,) = next(generator["envs"] for generator in generators if generator["name"] == asked.KEYS)
    example = (MANIFESTS / "secrets" / f"{file}.example").read_text()
    assert all(f"{key}=" in example.splitlines() for key in asked.KEYS_GIVE)
