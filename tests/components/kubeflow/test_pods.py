"""What tasks ask of Kubernetes: as data, as KFP's specification has it, and as errors that name field and value."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import yaml

from reflux.components.declare import PLATFORM_PARAMETERS
from reflux.components.distill.config import DistillConfig
from reflux.components.kubeflow import kfp_executor, pods
from reflux.components.kubeflow.pods import DEFAULTS, Pod, changed, check_accelerators
from reflux.pipelines import ir_lint, recipes
from reflux.pipelines.compile import compile_recipe, compile_to_text
from reflux.pipelines.distillation import distillation

ASKED = {
    "distill": {
        "cpu": "500m", "cpu_limit": "8", "memory": "24Gi", "memory_limit": "32Gi", "shared_memory": "2Gi",
        "tolerations": ["spot=yes:NoSchedule", "gpu:NoExecute"], "node_selector": ["pool=big"],
        "retries": 5, "retry_after_s": 30,
    },
    "calibrate": {"retries": 0},
}  # fmt: skip
INPUT = "{{{{$.inputs.parameters['pipelinechannel--{}']}}}}"


@pytest.fixture(scope="module")
def documents() -> list[Any]:
    recipe = recipes.overridden(recipes.demo(), {"kubernetes": ASKED})
    return list(yaml.safe_load_all(compile_recipe("demo", recipe)))


def executors(documents: list[Any], of: int) -> dict[str, Any]:
    spec = documents[0] if of == 0 else documents[1]["platforms"]["kubernetes"]
    return {name.removeprefix("exec-"): each for name, each in spec["deploymentSpec"]["executors"].items()}


def tasks(component: dict[str, Any], spec: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, task in component.get("dag", {}).get("tasks", {}).items():
        yield name, task
        yield from tasks(spec["components"][task["componentRef"]["name"]], spec)


def test_every_task_has_a_pod(documents: list[Any]) -> None:
    assert {name.replace("-", "_") for name in executors(documents, 0)} == DEFAULTS.keys() - {"merge_traces"}


def test_what_was_asked_for_is_in_the_specification(documents: list[Any]) -> None:
    resources = executors(documents, 0)["distill"]["container"]["resources"]
    assert {name: value for name, value in resources.items() if name.startswith("resource")} == {
        "resourceCpuRequest": "500m", "resourceCpuLimit": "8",
        "resourceMemoryRequest": "24Gi", "resourceMemoryLimit": "32Gi",
    }  # fmt: skip
    assert resources["accelerator"] == {
        "resourceType": INPUT.format("accelerator"), "resourceCount": INPUT.format("accelerators")
    }  # fmt: skip
    platform = executors(documents, 1)["distill"]
    assert platform["nodeSelector"] == {"labels": {"pool": "big"}}
    assert platform["tolerations"] == [
        {"key": "spot", "operator": "Equal", "value": "yes", "effect": "NoSchedule"},
        {"key": "gpu", "operator": "Exists", "effect": "NoExecute"},
    ]
    assert platform["emptyDirMounts"] == [
        {"volumeName": "shared-memory", "mountPath": "/dev/shm", "medium": "Memory", "sizeLimit": "2Gi"}
    ]
    policies = {name: task.get("retryPolicy") for name, task in tasks(documents[0]["root"], documents[0])}
    assert policies["distill"] == {
        "maxRetryCount": 5, "backoffDuration": "30s", "backoffFactor": 2.0, "backoffMaxDuration": pods.RETRIED_FOR
    }  # fmt: skip
    assert policies["calibrate"] is policies["prerequisites"] is policies["close-run"] is None
    assert policies["evaluate"]["maxRetryCount"] == 3


def test_a_limit_of_memory_that_nobody_gave_is_what_is_asked_for(documents: list[Any]) -> None:
    resources = executors(documents, 0)["prerequisites"]["container"]["resources"]
    assert resources["resourceMemoryLimit"] == resources["resourceMemoryRequest"] == "2Gi"
    assert resources.keys().isdisjoint({"resourceCpuLimit", "accelerator"})


def test_only_some_stages_get_what_the_form_asks_for(documents: list[Any]) -> None:
    given = {name for name, e in executors(documents, 0).items() if "accelerator" in e["container"]["resources"]}
    assert given == {"collect-traces", "profile-kv", "distill", "evaluate"}


def test_a_program_does_not_hear_of_the_inputs_that_decided_on_its_pod(documents: list[Any]) -> None:
    """KFP's driver puts them among its parameters, where a stage refuses what it does not know."""
    added = (
        set(dict(tasks(documents[0]["root"], documents[0]))["distill"]["inputs"]["parameters"])
        - {f.name for f in fields(DistillConfig)}
        - set(PLATFORM_PARAMETERS)
    )
    assert added, "else the rule is for nothing"
    values = {"seed": 1.0, **dict.fromkeys(added, "nvidia.com/gpu")}
    document = {"inputs": {"parameterValues": values}, "outputs": {"outputFile": "/tmp/output.json"}}
    assert kfp_executor.read(json.dumps(document)).parameters == {"seed": 1.0}


def test_on_one_machine_nothing_is_asked_for() -> None:
    text = compile_to_text(distillation(recipes.demo(), name="demo", attended=True))
    assert "retryPolicy" not in text
    assert "resources" not in text
    assert "tolerations" not in text
    assert ir_lint.lint(text) == []


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"distil": {}}, "kubernetes.distil: no such task; did you mean distill"),
        ({"distill": 3}, "kubernetes.distill: a table of fields is expected, not 3"),
        (3, "kubernetes: a table for each task is expected, not 3"),
        ({"distill": {"mem": "1Gi"}}, "kubernetes.distill.mem: no such field; did you mean memory"),
        ({"distill": {"memory": 24}}, "kubernetes.distill.memory: 24 is not text"),
        ({"distill": {"memory": "24GiB"}}, "kubernetes.distill.memory '24GiB': an amount .*such as 24Gi or 500M"),
        ({"distill": {"memory": "0"}}, "kubernetes.distill.memory '0': an amount"),
        ({"distill": {"memory_limit": "8Gi"}}, "distill.memory_limit '8Gi': must be at least memory, which is '16Gi'"),
        ({"distill": {"cpu": "2 cores"}}, "kubernetes.distill.cpu '2 cores': an amount .*such as 2, 0.5 or 500m"),
        (
            {"distill": {"cpu_limit": "3900m"}},
            "kubernetes.distill.cpu_limit '3900m': must be at least cpu, which is '4'",
        ),
        ({"distill": {"shared_memory": "all"}}, "kubernetes.distill.shared_memory 'all': an amount"),
        ({"distill": {"tolerations": ["gpu"]}}, "kubernetes.distill.tolerations 'gpu': write KEY=VALUE:EFFECT or KEY:"),
        ({"distill": {"tolerations": ["gpu:Never"]}}, "'gpu:Never': .* EFFECT one of NoSchedule, "),
        ({"distill": {"node_selector": ["big"]}}, "kubernetes.distill.node_selector 'big': write LABEL=VALUE"),
        ({"distill": {"retries": -1}}, "kubernetes.distill.retries -1, retry_after_s 60: must be at least 0"),
        (
            {"calibrate": {"pods": 2}},
            "kubernetes.calibrate.pods 2: works in one pod; more are allowed for collect_traces",
        ),
        ({"distill": {"pods": 0}}, "kubernetes.distill.pods 0: must be at least 1"),
        ({"distill": {"retries": 1.5}}, "kubernetes.distill.retries: 1.5 is not a whole number"),
    ],
)
def test_what_is_wrong_is_named(table: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(DEFAULTS, table)


def test_amounts_are_compared_across_units() -> None:
    assert Pod(memory="1500M", memory_limit="1.4Gi").memory_limit == "1.4Gi"
    with pytest.raises(ValueError, match=r"memory_limit '1\.4G'"):
        Pod(memory="1400Mi", memory_limit="1.4G")


@pytest.mark.parametrize(("accelerator", "accelerators"), [("", "1"), ("nvidia.com/gpu", "8"), ("amd.com/gpu", "0")])
def test_what_the_form_may_ask_for(accelerator: str, accelerators: str) -> None:
    check_accelerators(accelerator, accelerators)
