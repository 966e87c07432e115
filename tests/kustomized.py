"""What `kubectl kustomize` makes of a folder, as a person would apply it."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

MANIFESTS = Path(__file__).parents[1] / "manifests"
OVERLAYS = tuple(sorted(path.parent.name for path in MANIFESTS.glob("overlays/*/kustomization.yaml")))


def kubectl() -> str:
    """The program that pip installs with the development tools, else the machine's. CI must have one."""
    beside = Path(sys.executable).with_name("kubectl")
    found = str(beside) if beside.exists() else shutil.which("kubectl")
    if found is None:
        if "CI" in os.environ:
            pytest.fail("there is no kubectl, and CI may not skip what needs it")
        pytest.skip("there is no kubectl: its package has none for this platform, and the machine has none")
    return found


@functools.cache
def objects(folder: Path) -> tuple[dict[str, Any], ...]:
    """All objects of the folder's kustomization, in the order in which they are applied."""
    done = subprocess.run([kubectl(), "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "kustomize warns of what it will no longer do"
    return tuple(yaml.safe_load_all(done.stdout))


def overlay(name: str) -> tuple[dict[str, Any], ...]:
    return objects(MANIFESTS / "overlays" / name)


def secrets(folder: Path) -> tuple[dict[str, Any], ...]:
    """What manifests/secrets makes of its examples, copied into an empty folder and filled in."""
    shutil.copytree(MANIFESTS / "secrets", folder, ignore=shutil.ignore_patterns("*.env"), dirs_exist_ok=True)
    for example in folder.glob("*.env.example"):
        text = re.sub(r"^(\w+)=$", r"\1=filled-in", example.read_text(), flags=re.MULTILINE)
        example.with_suffix("").write_text(text)
    return objects(folder)


def of_kind(found: tuple[dict[str, Any], ...], kind: str) -> dict[str, dict[str, Any]]:
    """Name -> object."""
    return {each["metadata"]["name"]: each for each in found if each["kind"] == kind}


def pods(found: tuple[dict[str, Any], ...]) -> dict[str, dict[str, Any]]:
    """Workload -> the pods' labels and spec, of everything that starts pods."""
    templates = {}
    for each in found:
        holder = each.get("spec") or {}
        if each["kind"] == "CronJob":
            holder = holder["jobTemplate"]["spec"]
        if "template" in holder:
            templates[f"{each['kind']}/{each['metadata']['name']}"] = holder["template"]
    return templates


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
