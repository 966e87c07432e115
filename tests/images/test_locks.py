"""The locks name one file for every package, and the very versions that the tests run with."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def locked(file: str) -> dict[str, str]:
    """Package -> version; every line has exactly one hash."""
    lines = [line for line in (ROOT / "images" / file).read_text().splitlines() if not line.startswith("#")]
    found = {}
    for line in lines:
        match = re.fullmatch(r"([a-z0-9.-]+)==([^ ;]+) --hash=sha256:[0-9a-f]{64}", line)
        assert match, line
        assert match[1] not in found
        found[match[1]] = match[2]
    return found


def constraints() -> dict[str, str]:
    pairs = re.findall(r"^([\w.-]+)==(.+)$", (ROOT / "requirements/constraints.txt").read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.mark.parametrize(("name", "extras"), [("cpu", ["stages"]), ("gpu", ["stages", "gpu"]), ("serve", [])])
def test_a_lock_satisfies_pyproject(name: str, extras: list[str]) -> None:
    """What someone adds to an extra must be in the image, so the lock is made again: images/lock.py."""
    versions = locked(f"{name}/requirements.txt")
    for extra in [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras)]:
        for requirement in map(Requirement, extra):
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)])


@pytest.mark.parametrize("file", ["build.txt", *(f"{name}/requirements.txt" for name in ("cpu", "gpu", "mlflow"))])
def test_the_versions_are_those_of_the_tests(file: str) -> None:
    versions = {name: version.removesuffix("+cpu") for name, version in locked(file).items()}
    ours = {name: version for name, version in versions.items() if name in constraints()}
    assert ours == {name: constraints()[name] for name in ours}
    missing = versions.keys() - ours.keys()
    assert all(name.startswith(("nvidia-", "cuda-")) for name in missing), "tested nowhere, and not from CUDA's maker"


def test_only_the_cpu_image_has_a_cpu_build() -> None:
    torch = {name: locked(f"{name}/requirements.txt")["torch"] for name in ("cpu", "gpu", "serve")}
    assert {name: version.endswith("+cpu") for name, version in torch.items()} == {
        "cpu": True, "gpu": False, "serve": False,
    }  # fmt: skip
    assert not [name for name in locked("cpu/requirements.txt") if name.startswith(("nvidia-", "cuda-", "triton"))]


def test_the_server_is_pinned() -> None:
    assert "vllm" in locked("serve/requirements.txt")


def test_mlflows_server_reaches_its_database_and_its_bucket() -> None:
    assert {"mlflow", "psycopg2-binary", "boto3"} <= locked("mlflow/requirements.txt").keys()
