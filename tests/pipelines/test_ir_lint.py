"""Every rule of the lint, on what KFP itself compiles: it accepts all of these without a word."""

# no `from __future__ import annotations`: KFP reads the signatures of these functions

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import yaml
from kfp import dsl

from reflux.pipelines import ir_lint, recipes
from reflux.pipelines.compile import compile_to_text
from reflux.pipelines.distillation import distillation
from reflux.pipelines.ir_lint import lint

DIGEST = "registry/python-say@sha256:" + "ab" * 32


@dsl.container_component
def say(text: str, also: dict = {}) -> dsl.ContainerSpec:  # noqa: B006
    return dsl.ContainerSpec(image=DIGEST, command=["python3"], args=["--text", text, "--also", also])


def compiled(body: Callable[..., None], *, cached: bool = False) -> str:
    """A pipeline of that body, its tasks without KFP's cache."""

    @dsl.pipeline(name="talk")
    def talk(word: str = "hello") -> None:
        for task in body(word):
            task.set_caching_options(cached)

    return compile_to_text(talk)


def found(text: str, **options: Any) -> list[str]:
    return [str(finding) for finding in lint(text, **options)]


def spoken(*args: Any, image: str = DIGEST, **component: Any) -> str:
    """A pipeline of one container with these arguments."""

    @dsl.container_component
    def speak() -> dsl.ContainerSpec:
        return dsl.ContainerSpec(image=image, command=["python3"], args=list(args))

    return compiled(lambda word: [speak()])


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_our_own_pipeline_is_clean(name: str) -> None:
    text = compile_to_text(distillation(recipes.named(name), name=name))
    assert found(text) == []
    (first, *_) = found(text, require_digests=True)
    assert first.startswith("close-run, image: reflux-python-cpu:"), "its default image is a tag"
    assert found(compile_to_text(distillation(recipes.named(name), DIGEST, name=name)), require_digests=True) == []


@pytest.mark.parametrize(
    "placeholder",
    [
        dsl.PIPELINE_JOB_ID_PLACEHOLDER, dsl.PIPELINE_JOB_NAME_PLACEHOLDER, dsl.PIPELINE_JOB_RESOURCE_NAME_PLACEHOLDER,
        dsl.PIPELINE_TASK_NAME_PLACEHOLDER, dsl.PIPELINE_TASK_ID_PLACEHOLDER,
        dsl.PIPELINE_JOB_CREATE_TIME_UTC_PLACEHOLDER, dsl.PIPELINE_JOB_SCHEDULE_TIME_UTC_PLACEHOLDER,
    ],
)  # fmt: skip
def test_a_placeholder_is_resolved_only_as_a_whole_value(placeholder: str) -> None:
    assert found(compiled(lambda word: [say(text=placeholder)])) == []
    assert found(compiled(lambda word: [say(text=f"run-{placeholder}")])) == [
        f"say, input text: run-{placeholder}; {placeholder} is resolved only where it is the whole value; "
        "pass it as an input of its own"
    ]
    (nested,) = found(compiled(lambda word: [say(text="hello", also={"deep": [placeholder]})]))
    assert nested.startswith(f"say, input also: {placeholder}; ")


@pytest.mark.parametrize(
    "placeholder", [dsl.PIPELINE_ROOT_PLACEHOLDER, dsl.PIPELINE_TASK_EXECUTOR_OUTPUT_PATH_PLACEHOLDER]
)
def test_some_placeholders_are_resolved_nowhere(placeholder: str) -> None:
    (as_input,) = found(compiled(lambda word: [say(text=placeholder)]))
    assert as_input.startswith(f"say, input text: {placeholder}; a cluster does not resolve {placeholder}")
    (as_argument,) = found(spoken("--out", placeholder))
    assert as_argument.startswith(f"speak, args[1]: {placeholder}; a cluster does not resolve {placeholder}")


def test_a_job_placeholder_is_not_resolved_in_an_argument_or_a_variable() -> None:
    (argument,) = found(spoken(dsl.PIPELINE_JOB_ID_PLACEHOLDER))
    assert argument.startswith("speak, args[0]: {{$.pipeline_job_uuid}}; ")
    assert argument.endswith("make it an input, as a whole value")

    def with_variable(word: str) -> list[Any]:
        return [say(text="x").set_env_variable("RUN", dsl.PIPELINE_JOB_ID_PLACEHOLDER)]

    (variable,) = found(compiled(with_variable))
    assert variable.startswith("say, env RUN: {{$.pipeline_job_uuid}}; no placeholder is resolved in a variable")


def test_a_value_joined_with_another() -> None:
    (joined,) = found(compiled(lambda word: [say(text=f"well, {word}")]))
    assert "a value inside a longer one is substituted by chance" in joined


def test_what_is_known_of_an_artifact_only_here() -> None:
    @dsl.container_component
    def read(source: dsl.Input[dsl.Dataset]) -> dsl.ContainerSpec:
        return dsl.ContainerSpec(image=DIGEST, command=["python3"], args=[source.metadata["digest"]])

    def body(word: str) -> list[Any]:
        data = dsl.importer(artifact_uri="s3://bucket/data", artifact_class=dsl.Dataset)
        return [data, read(source=data.output)]

    (finding,) = found(compiled(body))
    assert finding.startswith("read, args[0]: {{$.inputs.artifacts['source'].metadata['digest']}}; a cluster does not")


def test_what_the_launcher_resolves_is_allowed() -> None:
    @dsl.container_component
    def copy(text: str, source: dsl.Input[dsl.Dataset], target: dsl.Output[dsl.Dataset], out: dsl.OutputPath(str)):  # type: ignore[valid-type,no-untyped-def]
        everything = [
            source.uri,
            source.path,
            target.uri,
            target.path,
            out,
            dsl.PIPELINE_TASK_EXECUTOR_INPUT_PLACEHOLDER,
        ]
        return dsl.ContainerSpec(image=DIGEST, command=["python3"], args=[f"--text={text}", *everything])

    def body(word: str) -> list[Any]:
        data = dsl.importer(artifact_uri="s3://bucket/data", artifact_class=dsl.Dataset)
        return [data, copy(text=word, source=data.output)]

    assert found(compiled(body)) == []


def test_concat_and_if_present() -> None:
    @dsl.container_component
    def perhaps(text: str = "", data: dsl.Input[dsl.Dataset] = None) -> dsl.ContainerSpec:  # type: ignore[assignment]
        of_a_text = dsl.IfPresentPlaceholder(input_name="text", then=["--text", text])
        of_data = dsl.IfPresentPlaceholder(input_name="data", then=["--data", data.uri], else_=["--none"])
        joined = dsl.IfPresentPlaceholder(input_name="text", then=[dsl.ConcatPlaceholder(["a-", text])])
        return dsl.ContainerSpec(image=DIGEST, command=["python3"], args=[of_a_text, of_data, joined])

    data, joined = found(compiled(lambda word: [perhaps(text="x")]))
    assert data.startswith('perhaps, args[1]: {"IfPresent"')
    assert "of an artifact a cluster always takes Else" in data
    assert joined.startswith('perhaps, args[2]: {"Concat"')


def test_kfps_cache() -> None:
    on = compiled(lambda word: [say(text="x")], cached=True)
    assert found(on) == [
        "say, cachingOptions: enableCache: true; KFP's cache compares addresses and hides a file that changed; "
        ".set_caching_options(False)"
    ]
    spec = yaml.safe_load(on)
    del spec["root"]["dag"]["tasks"]["say"]["cachingOptions"]
    assert "cachingOptions: absent" in found(yaml.safe_dump(spec))[0]


def test_tasks_inside_loops_are_looked_at() -> None:
    def loop(word: str) -> list[Any]:
        with dsl.ParallelFor([1, 2]):
            return [say(text=f"x{dsl.PIPELINE_JOB_ID_PLACEHOLDER}")]

    def items(word: str) -> list[Any]:
        with dsl.ParallelFor([dsl.PIPELINE_JOB_ID_PLACEHOLDER, "b"]) as item:
            return [say(text=item)]

    assert "items of the loop: " in found(compiled(items))[0]
    (finding,) = found(compiled(loop))
    assert re.match(r"for-loop-\d+/say, input text: ", finding)


def test_images() -> None:
    assert found(spoken(image="registry/python-say:1.0")) == []
    (tag,) = found(spoken(image="registry/python-say:1.0"), require_digests=True)
    assert tag.startswith("speak, image: registry/python-say:1.0; a tag is a name that moves")

    def chosen(word: str) -> list[Any]:
        return [say(text="x").set_container_image(word)]

    assert found(compiled(chosen)) == []
    (by_the_form,) = found(compiled(chosen), require_digests=True)
    assert "so no digest can be required" in by_the_form


def test_a_resource_that_an_input_decides_is_text() -> None:
    @dsl.pipeline(name="talk")
    def talk(kind: str = "nvidia.com/gpu", count: int = 1, number: str = "1") -> None:
        for limit in (number, count):
            task = say(text="x").set_caching_options(False)
            task.set_accelerator_type(kind).set_accelerator_limit(limit)

    text = compile_to_text(talk)
    (of_a_number,) = found(text)
    count = "{{$.inputs.parameters['pipelinechannel--count']}}"
    assert of_a_number.startswith(f"say-2, resources: {count}, a NUMBER_INTEGER; a cluster reads no numbers here")
    spec = yaml.safe_load(text)
    spec["deploymentSpec"]["executors"]["exec-say-2"]["container"]["resources"] = {"resourceMemoryLimit": f"{count}Gi"}
    (joined,) = found(yaml.safe_dump(spec))
    assert joined.startswith(f"say-2, resources: {count}Gi; a resource is one input of the task, whole, or fixed")


def test_retries_of_long_work() -> None:
    (default,) = found(compiled(lambda word: [say(text="x").set_retry(2)]))
    assert default.startswith(
        "say, retryPolicy.backoffMaxDuration: 3600s; Argo counts it from the beginning of the first"
    )
    assert found(compiled(lambda word: [say(text="x").set_retry(2, backoff_max_duration="86400s")])) == []


def test_sizes() -> None:
    long = "x" * int(ir_lint.ARGUMENT_BYTES * ir_lint.NEAR + 1)
    places = [finding.split(": ")[0] for finding in found(compiled(lambda word: [say(text=long)]))]
    assert places == ["the pipeline, component root", "say, executor input"]
    assert "speak, args[0]" in [finding.split(": ")[0] for finding in found(spoken(long))]
    (whole,) = [f for f in found(spoken(*["x" * 1000] * 1100)) if f.startswith("the pipeline, size")]
    assert "a specification stays below 1,000,000 bytes" in whole


def test_a_default_of_the_form_is_not_resolved() -> None:
    spec = yaml.safe_load(compiled(lambda word: [say(text=word)]))
    spec["root"]["inputDefinitions"]["parameters"]["word"]["defaultValue"] = dsl.PIPELINE_JOB_ID_PLACEHOLDER
    (finding,) = found(json.dumps(spec))
    assert finding.startswith("the pipeline, default of word: {{$.pipeline_job_uuid}}; ")


def test_objects_of_kubernetes_hold_specifications_too() -> None:
    spec = yaml.safe_load(compiled(lambda word: [say(text="x")], cached=True))
    version = {"kind": "PipelineVersion", "spec": {"pipelineName": "talk", "pipelineSpec": spec}}
    assert len(found(yaml.safe_dump_all([{"kind": "Pipeline"}, version]))) == 1


WHOLE = """
root: {dag: {tasks: {say: {componentRef: {name: speech}, cachingOptions: {}}}}}
components: {speech: {executorLabel: program}}
deploymentSpec: {executors: {program: {container: {image: i, args: [hello]}}}}
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("name: speech", "name: silence"), "component 'silence' of task say is not there"),
        (("executorLabel: program", "executorLabel: none"), "executor 'none' of task say is not there"),
        (
            ("executorLabel: program", "dag: {tasks: {echo: {componentRef: {name: speech}}}}"),
            "task say/echo is in itself",
        ),
        (("args: [hello]", "args: [3]"), "args"),
        (("cachingOptions: {}", "retryPolicy: {backoffMaxDuration: 3h}"), "backoffMaxDuration"),
        (("root: {dag", "root: null\nother: {dag"), "no document in it has root and deploymentSpec"),
    ],
)
def test_a_broken_specification_is_named_and_not_fallen_over(change: tuple[str, str], message: str) -> None:
    assert found(WHOLE) == []
    with pytest.raises(ValueError, match="not a KFP specification: ") as caught:
        lint(WHOLE.replace(*change))
    assert message in str(caught.value)


FULL = """
root:
  inputDefinitions: {parameters: {word: {parameterType: STRING, defaultValue: hello}}}
  dag:
    tasks:
      say:
        componentRef: {name: speech}
        cachingOptions: {enableCache: false}
        inputs: {parameters: {text: {runtimeValue: {constant: well}}, word: {componentInputParameter: word}}}
        parameterIterator: {itemInput: text, items: {raw: '[1]'}}
        retryPolicy: {maxRetryCount: 2, backoffMaxDuration: 7200s}
components:
  speech:
    executorLabel: program
    inputDefinitions:
      parameters: {text: {parameterType: STRING}, word: {parameterType: STRING}}
      artifacts: {data: {artifactType: {schemaTitle: system.Dataset}}}
    outputDefinitions: {artifacts: {out: {artifactType: {schemaTitle: system.Dataset}}}}
deploymentSpec:
  executors:
    program:
      container:
        image: i
        args: [hello]
        env: [{name: A, value: b}]
        resources: {resourceMemoryRequest: 1Gi}
"""


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The way to every value inside."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield (*path, key)
        yield from places(each, (*path, key))


def test_a_null_anywhere_is_as_if_nothing_stood_there() -> None:
    ways = [*places(yaml.safe_load(FULL))]
    assert len(ways) > 50
    for way in ways:
        spec = yaml.safe_load(FULL)
        above = spec
        for key in way[:-1]:
            above = above[key]
        above[way[-1]] = None
        with suppress(ValueError):
            lint(yaml.safe_dump(spec))
    assert found(FULL) == []
    assert found(FULL.replace("components:\n", "dag: null\ncomponents:\n")) == []


@pytest.mark.parametrize(
    "argument",
    [
        '{"Concat": hello',
        '{"IfPresent": null}',
        '{"IfPresent": {"InputName": null, "Then": null}}',
        '{"IfPresent": [1]}',
    ],
)
def test_an_argument_that_only_begins_like_kfps_json_is_text(argument: str) -> None:
    assert found(WHOLE.replace("[hello]", json.dumps([argument]))) == []


@pytest.mark.parametrize("text", ["", "a: b", "[1]", "a: [", os.linesep, "spec: null", "spec: {pipelineSpec: 3}"])
def test_what_is_no_specification(text: str) -> None:
    with pytest.raises(ValueError, match="not a KFP specification: "):
        lint(text)
