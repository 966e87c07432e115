"""What `reflux compile` gives: the same bytes every time, without a heavy library, in a form that KFP loads."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import yaml
from kfp.components import load_component_from_text

from reflux.components import environment
from reflux.components.declare import IMAGE
from reflux.pipelines import recipes
from reflux.pipelines.compile import compile_recipe, compile_to_text, require_equal
from reflux.pipelines.distillation import distillation

# a person who only submits runs has none of these, so importing them is made an error
COMPILE = """
import sys
for name in ("torch", "triton", "pyarrow", "mlflow", "transformers", "boto3"):
    sys.modules[name] = None
from reflux.pipelines import recipes
from reflux.pipelines.compile import compile_to_text
from reflux.pipelines.distillation import distillation
from reflux.pipelines.recipes import RECIPES
sys.stdout.write(compile_to_text(distillation(RECIPES["demo"](), name="demo")))
"""
SOURCES = {"teacher", "student", "prompts_uri", "labels_uri", "eval_text_uri", "entity_model", "start_uri"}
FORM = {  # parameter -> its type; KFP's form shows name and type
    **dict.fromkeys({"store", "run", "recipe", "objective", "registered_model"} | SOURCES, "STRING"),
    **dict.fromkeys({"accelerator", "accelerators"}, "STRING"),
    "overrides": "STRUCT",
}
REQUIRED = {"store"}
EDGES = {  # task -> the tasks that it waits for
    "prerequisites": set(),
    "collect-traces": {"prerequisites"},
    "profile-kv": {"collect-traces"},
    "ingest-labels": {"collect-traces"},
    "distill": {"collect-traces", "profile-kv", "ingest-labels"},
    "calibrate": {"collect-traces", "profile-kv", "distill"},
    "evaluate": {"collect-traces", "profile-kv", "distill", "calibrate"},
}
GROUP, EXIT = "exit-handler-1", "close-run"
FOR_THE_POD = {  # KFP adds them where the form decides on a resource
    "pipelinechannel--accelerator", "pipelinechannel--accelerators", "accelerator_type", "accelerator_count",
}  # fmt: skip


def stages(spec: Any) -> Any:
    """The tasks before the exit task, by name."""
    return spec["components"][f"comp-{GROUP}"]["dag"]["tasks"]


def compiled(hash_seed: int) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    return subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture(scope="module")
def text() -> str:
    return compiled(0)


@pytest.fixture(scope="module")
def spec(text: str) -> Any:
    return next(yaml.safe_load_all(text))


def test_equal_bytes_whatever_the_hash_seed(text: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(compiled, (1, 2))) == [text, text]


def test_kfp_loads_it(text: str) -> None:
    component = load_component_from_text(text)
    assert set(component.component_spec.inputs) == set(FORM)


def test_the_form(spec: Any) -> None:
    """Few parameters with defaults, and a drop-down where there is a choice."""
    parameters = spec["root"]["inputDefinitions"]["parameters"]
    assert {name: parameter["parameterType"] for name, parameter in parameters.items()} == FORM
    assert {name for name, parameter in parameters.items() if "defaultValue" not in parameter} == REQUIRED
    choices = {name: parameter["literals"] for name, parameter in parameters.items() if "literals" in parameter}
    assert set(choices) == {"recipe", "objective"}
    assert choices["recipe"] == ["demo"]
    assert {"beta_jsd", "forward_kl", "reverse_kl"} <= set(choices["objective"])
    assert all(parameters[name]["defaultValue"] in allowed for name, allowed in choices.items())
    assert parameters["overrides"]["defaultValue"] == {}


def test_every_stage_shows_its_numbers_and_a_page(spec: Any) -> None:
    shown = {}
    for name in EDGES:
        component = spec["components"][f"comp-{name}"]
        artifacts = component.get("outputDefinitions", {}).get("artifacts", {})
        shown[name] = {n: a["artifactType"]["schemaTitle"] for n, a in artifacts.items()}
    assert shown.pop("prerequisites") == {}
    for artifacts in shown.values():
        assert artifacts["metrics"] == "system.Metrics"
        assert artifacts["summary"] == "system.Markdown"
        assert list(artifacts.values()).count("system.Dataset") == 1
    pages = {name: [n for n, title in artifacts.items() if title == "system.HTML"] for name, artifacts in shown.items()}
    assert {name: found for name, found in pages.items() if found} == {"evaluate": ["report"], "profile-kv": ["plots"]}


def test_the_graph(spec: Any) -> None:
    assert {name: set(task.get("dependentTasks", [])) for name, task in stages(spec).items()} == EDGES


def test_a_task_closes_the_run_however_the_others_end(spec: Any) -> None:
    tasks = spec["root"]["dag"]["tasks"]
    assert set(tasks) == {GROUP, EXIT}
    assert tasks[EXIT]["dependentTasks"] == [GROUP]
    assert tasks[EXIT]["triggerPolicy"] == {"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"}
    assert tasks[EXIT]["inputs"]["parameters"] == {
        "run": {"componentInputParameter": "run"},
        "job": {"runtimeValue": {"constant": "{{$.pipeline_job_uuid}}"}},
        "status": {"taskFinalStatus": {"producerTask": GROUP}},
    }
    assert "outputDefinitions" not in spec["components"][f"comp-{EXIT}"]


def test_kfps_cache_is_off_on_every_task(spec: Any) -> None:
    tasks = {**stages(spec), EXIT: spec["root"]["dag"]["tasks"][EXIT]}
    assert {
        name: task.get("cachingOptions", {}).get("enableCache", False) for name, task in tasks.items()
    } == dict.fromkeys([*EDGES, EXIT], False)
    assert all("cachingOptions" in task for task in tasks.values())  # absent would leave it to the cluster's default


def test_every_container_takes_the_executor_input(spec: Any) -> None:
    executors = spec["deploymentSpec"]["executors"]
    assert len(executors) == len(EDGES) + 1
    for name, executor in executors.items():
        stage = name.removeprefix("exec-").replace("-", "_")
        assert {key: value for key, value in executor["container"].items() if key != "resources"} == {
            "image": IMAGE,
            "command": ["python3", "-m", "reflux.components", stage],
            "args": ["--executor-input", "{{$}}"],
            "env": [{"name": environment.COMPILED_BY, "value": environment.version()}],
        }


def test_every_field_of_a_config_is_given_as_a_constant_or_from_the_pipeline(spec: Any) -> None:
    """A recipe is complete: no stage falls back on a default of its component, which could change behind the recipe."""
    for task in stages(spec).values():
        declared = spec["components"][task["componentRef"]["name"]]["inputDefinitions"]["parameters"]
        given = task["inputs"]["parameters"]
        assert set(given) - FOR_THE_POD == set(declared)
        for name in set(FORM) & set(given):
            assert given[name] == {"componentInputParameter": f"pipelinechannel--{name}"}
        student = {"componentInputParameter": "pipelinechannel--student"}
        assert given.get("student_uri", student) == student
        assert given["job"] == {"runtimeValue": {"constant": "{{$.pipeline_job_uuid}}"}}, (
            "whole, so that it is resolved"
        )


def test_who_checks_and_closes_needs_no_tasks_for_it() -> None:
    spec = next(yaml.safe_load_all(compile_to_text(distillation(recipes.demo(), name="demo", attended=True))))
    assert set(spec["root"]["dag"]["tasks"]) == set(EDGES) - {"prerequisites"}


def test_traces_are_collected_by_several_pods_and_joined() -> None:
    recipe = recipes.overridden(recipes.demo(), {"kubernetes": {"collect_traces": {"pods": 3}}})
    text = compile_recipe("demo", recipe)
    spec, platform = yaml.safe_load_all(text)
    tasks = stages(spec)
    (loop,) = tasks.keys() - EDGES.keys() - {"merge-traces"}
    assert tasks[loop]["parameterIterator"]["items"] == {"raw": '["1/3", "2/3", "3/3"]'}
    assert tasks[loop]["dependentTasks"] == ["prerequisites"]
    parts = spec["components"][tasks[loop]["componentRef"]["name"]]["dag"]["tasks"]["collect-traces"]
    item = tasks[loop]["parameterIterator"]["itemInput"]
    assert parts["inputs"]["parameters"]["part"] == {"componentInputParameter": item}
    assert parts["retryPolicy"]["maxRetryCount"] == 3, "each part is begun again by itself"
    assert tasks["merge-traces"]["inputs"]["artifacts"]["parts"]["taskOutputArtifact"]["producerTask"] == loop
    readers = {name for name, task in tasks.items() if "merge-traces" in task.get("dependentTasks", [])}
    assert readers == {name for name, before in EDGES.items() if "collect-traces" in before}
    executors = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert executors.keys() == spec["deploymentSpec"]["executors"].keys()
    on_one_machine = compile_to_text(distillation(recipe, name="demo", attended=True))
    assert on_one_machine == compile_to_text(distillation(recipes.demo(), name="demo", attended=True))


def test_what_leaves_for_a_cluster_is_checked_twice() -> None:
    text = compile_recipe("demo", recipes.demo(), store="s3://bucket/reflux")
    (default,) = [
        parameter["defaultValue"]
        for name, parameter in next(yaml.safe_load_all(text))["root"]["inputDefinitions"]["parameters"].items()
        if name == "store"
    ]
    assert default == "s3://bucket/reflux"
    with pytest.raises(ValueError, match=r"collect-traces, image: reflux-python-cpu:.*; a tag is a name that moves"):
        compile_recipe("demo", recipes.demo(), require_digests=True)
    with pytest.raises(ValueError, match="line 2 is 'b' in one and 'c' in the other"):
        require_equal("a\nb\n", "a\nc\n")


def test_an_image_of_your_own() -> None:
    text = compile_to_text(distillation(recipes.demo(), "registry/python-mine@sha256:ab", name="demo"))
    executors = next(yaml.safe_load_all(text))["deploymentSpec"]["executors"].values()
    assert {executor["container"]["image"] for executor in executors} == {"registry/python-mine@sha256:ab"}


def test_the_default_image_is_of_this_version() -> None:
    assert IMAGE.partition(":")[2] == importlib.metadata.version("reflux")


def test_values_reach_the_constants() -> None:
    from toy_stages.pipeline import tea_party

    spec = next(yaml.safe_load_all(compile_to_text(tea_party(note="python3 in a note", minutes=7))))
    given = spec["root"]["dag"]["tasks"]["brew"]["inputs"]["parameters"]
    assert given["note"] == {"runtimeValue": {"constant": "python3 in a note"}}
    assert given["minutes"] == {"runtimeValue": {"constant": 7.0}}
    assert given["leaves"] == {"componentInputParameter": "leaves"}
