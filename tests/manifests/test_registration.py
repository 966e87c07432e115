"""The Job that registers the pipeline does so when it is run as it stands, against the contract test's server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kustomized import containers, of_kind, overlay, pods
from servers.kfp_api_contract import Contract, serving

from reflux.pipelines import recipes
from reflux.pipelines.kubeflow.package import of_recipe

TOKEN = "/var/run/secrets/kubeflow/pipelines/token"


@pytest.fixture
def contract() -> Iterator[Contract]:
    with serving() as server:
        yield server


def container() -> dict[str, Any]:
    (only,) = containers(pods(overlay("cluster"))["Job/reflux-register"])
    return only


def settings() -> dict[str, str]:
    data: dict[str, str] = of_kind(overlay("cluster"), "ConfigMap")["reflux-settings"]["data"]
    return data


def environment(endpoint: str) -> dict[str, str]:
    """The container's variables, as Kubernetes would fill them in; only where the API is, is this machine's."""
    found = {}
    for variable in container()["env"]:
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            assert source == {"fieldRef": {"fieldPath": "metadata.namespace"}}
            found[variable["name"]] = "kubeflow"
        else:
            found[variable["name"]] = variable.get("value") or settings()[source["configMapKeyRef"]["key"]]
    return found | {"KF_PIPELINES_ENDPOINT": endpoint}


def register(endpoint: str, token: Path) -> str:
    """What the Job's command prints, with $(VARIABLES) put in as Kubernetes does."""
    variables = environment(endpoint)
    program, *rest = [*container()["command"], *container()["args"]]
    assert program == "python3"
    rest = [re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], each).replace(TOKEN, str(token)) for each in rest]
    done = subprocess.run(
        [sys.executable, *rest], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_it_registers_what_compile_gives_once_and_within_its_rights(contract: Contract, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t0ken")
    assert "pipeline: reflux-demo (" in register(contract.url, token)
    package = of_recipe("demo", recipes.demo(), image=container()["image"], store=settings()["REFLUX_STORE"])
    (pipeline,), (version,) = contract.state.pipelines.values(), contract.state.versions.values()
    assert pipeline["display_name"] == "reflux-demo"
    assert version["display_name"] == f"reflux-demo-{package.digest[:12]}"
    assert version["pipeline_spec"]["pipeline_spec"] == package.spec
    (sent,) = [body for _, path, body in contract.changes() if "upload_version" in path]
    assert sent == package.text
    before = len(contract.changes())
    register(contract.url, token)
    assert contract.changes()[before:] == []
    # in multi-user mode each is a question to Kubernetes, which the Role answers for pipelines and versions alone
    paths = {path.partition("?")[0] for _, path, _ in contract.asked}
    assert all(re.fullmatch(r"/apis/v2beta1/(healthz|pipelines(/.*)?)", path) for path in paths), paths
