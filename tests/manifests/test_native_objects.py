"""What is registered as objects of Kubernetes is what `reflux compile` gives, whatever it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from kfp.compiler import Compiler, KubernetesManifestOptions
from toy_stages.pipeline import tea_party

from reflux.pipelines.__main__ import cli
from reflux.pipelines.compile import compile_to_text
from reflux.pipelines.kubeflow import native_objects, registration
from reflux.pipelines.kubeflow.package import Package

IMAGE = "registry.test/reflux-python-cpu@sha256:ab"


def objects(package: Package, pipeline: str = "reflux-demo", namespace: str = "") -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(native_objects.to_yaml(package, pipeline=pipeline, namespace=namespace)))


def reflux(*arguments: str) -> str:
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_command_writes_the_specification_that_compile_gives() -> None:
    asked = ["compile", "--recipe", "demo", "--image", IMAGE]
    compiled = list(yaml.safe_load_all(reflux(*asked)))
    pipeline, version = yaml.safe_load_all(reflux(*asked, "--as", "objects", "--namespace", "team-a"))
    registered = [version["spec"]["pipelineSpec"], *filter(None, [version["spec"].get("platformSpec")])]
    assert registered == compiled
    assert version["spec"]["pipelineName"] == pipeline["metadata"]["name"] == "reflux-demo"
    assert {each["metadata"]["namespace"] for each in (pipeline, version)} == {"team-a"}


def test_what_is_for_kubernetes_goes_beside_it() -> None:
    platform = {"platforms": {"kubernetes": {"deploymentSpec": {"executors": {"exec-a": {}}}}}}
    text = yaml.safe_dump_all([{"pipelineInfo": {"name": "p"}, "root": {}}, platform])
    _, version = objects(Package(text=text))
    assert version["spec"]["platformSpec"] == platform
    assert "platformSpec" not in objects(Package(text="pipelineInfo: {name: p}\n"))[1]["spec"]


def test_they_are_the_objects_that_kfps_own_compiler_writes(tmp_path: Path) -> None:
    pipeline = tea_party(note="python3: 1e-6, ünïcode, 'quotes'", minutes=7)
    package = Package(text=compile_to_text(pipeline))
    ours = objects(package, "tea-party", "kubeflow")
    options = KubernetesManifestOptions(
        pipeline_name="tea-party", pipeline_version_name=ours[1]["metadata"]["name"], namespace="kubeflow",
        include_pipeline_manifest=True,
    )  # fmt: skip
    path = tmp_path / "kfp.yaml"
    Compiler().compile(pipeline, str(path), kubernetes_manifest_format=True, kubernetes_manifest_options=options)
    theirs = list(yaml.safe_load_all(path.read_text()))
    for each in theirs:
        each["spec"].pop("description", None)
    assert ours == theirs


def test_a_version_is_named_by_what_it_holds() -> None:
    one, other = Package(text="pipelineInfo: {name: p}\n"), Package(text="pipelineInfo: {name: q}\n")
    names = [objects(package)[1]["metadata"]["name"] for package in (one, one, other)]
    assert names[0] == names[1] != names[2]
    assert names[0] == registration.version_name("reflux-demo", one) == f"reflux-demo-{one.digest[:12]}"


@pytest.mark.parametrize("name", ["Reflux", "reflux_demo", "-reflux", "r" * 64, ""])
def test_a_name_that_kubernetes_would_not_take_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="small letters, digits"):
        native_objects.to_yaml(Package(text="a: 1\n"), pipeline=name)
    with pytest.raises(ValueError, match="--namespace"):
        native_objects.to_yaml(Package(text="a: 1\n"), pipeline="p", namespace=name or "_")
