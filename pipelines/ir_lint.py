"""What a Kubeflow cluster cannot run of a compiled specification, found before it is uploaded.

KFP compiles, and runs locally, more than its backend knows: the driver resolves a placeholder only where it is a whole
value, never in an environment variable, and some of them nowhere; Concat reaches the program as JSON. Nothing says so:
the stage gets the literal text. These rules are read off the driver and the launcher of KFP 2.17 (backend/src/v2), and
hold for every specification, whoever made it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from reflux.pipelines import ir_tasks
from reflux.pipelines.ir_tasks import Task

SPEC_BYTES = 1_000_000
"""A Kubernetes object ends at 1.5 MB in etcd, and the workflow that KFP makes holds more than the specification."""
ARGUMENT_BYTES = 128 * 1024
"""Linux's MAX_ARG_STRLEN: execve fails with E2BIG for a longer one."""
NEAR = 0.75
"""Of that: addresses and the metadata of artifacts are only known when the task runs."""
_ARTIFACT_BYTES = 1024  # assumed for each artifact in an executor input: its address and metadata

_PLACEHOLDER = re.compile(r"\{\{\$.*?\}\}")
_WHOLE = {
    f"{{{{$.{name}}}}}"
    for name in (
        "pipeline_job_name", "pipeline_job_resource_name", "pipeline_job_uuid", "pipeline_task_name",
        "pipeline_task_uuid", "pipeline_job_create_time_utc", "pipeline_job_schedule_time_utc",
    )
}  # fmt: skip
_WORKSPACE = "{{$.workspace_path}}"
_INPUT = re.compile(r"\{\{\$\.inputs\.parameters\['(?P<name>[^']+)'\]\}\}")
_CHANNEL = "pipelinechannel--"
"""Before the name of a pipeline's input, within the groups of its tasks."""
_KFPS_LONGEST_S = 3600.0
"""What KFP's SDK writes into every retry policy that says nothing of it."""
_ARGUMENT = re.compile(
    r"\{\{\$(\.inputs\.parameters\['[^']+'\]|\.(inputs|outputs)\.artifacts\['[^']+'\]\.(uri|path)"
    r"|\.outputs\.parameters\['[^']+'\]\.output_file|\.workspace_path|)\}\}"
)
_DIGEST = re.compile(r".+@sha256:[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that will not work."""

    task: str
    """Its path, "" for the pipeline itself."""
    place: str
    value: str
    remedy: str

    def __str__(self) -> str:
        value = self.value if len(self.value) <= 120 else f"{self.value[:120]}…"
        return f"{self.task or 'the pipeline'}, {self.place}: {value}; {self.remedy}"


def lint(text: str, *, require_digests: bool = False) -> list[Finding]:
    """Everything found in a specification (YAML or JSON, or a PipelineVersion that holds one). ValueError if the text
    is none.
    """
    found = []
    for spec in ir_tasks.specifications(text):
        tasks = ir_tasks.tasks(spec)
        found += [*_defaults(spec), *_oversized(text, spec)]
        for task in tasks:
            found += [*_inputs(task), *_oversized_input(task, spec)]
            if task.executor is not None:
                found += [*_caching(task), *_program(task), *_image(task, require_digests), *_retries(task)]
                found += _resources(task, spec)
    return found


def _defaults(spec: dict[str, Any]) -> Iterator[Finding]:
    for name, parameter in spec["root"].get("inputDefinitions", {}).get("parameters", {}).items():
        for text in _texts(parameter.get("defaultValue")):
            if _PLACEHOLDER.search(text):
                yield Finding(
                    task="", place=f"default of {name}", value=text,
                    remedy="no default is resolved; give the placeholder to the task itself, as a whole value",
                )  # fmt: skip


def _inputs(task: Task) -> Iterator[Finding]:
    declared = task.component.get("inputDefinitions", {}).get("parameters", {})
    for name, constant in task.constants().items():
        text = constant if isinstance(constant, str) else ""
        if text in _WHOLE or (
            name not in declared and _INPUT.fullmatch(text)
        ):  # an image or limit that the form decides
            continue
        for text in _texts(constant):
            for placeholder in _PLACEHOLDER.findall(text):
                if placeholder != _WORKSPACE:
                    yield Finding(task=task.path, place=f"input {name}", value=text, remedy=_of_an_input(placeholder))

    items = task.spec.get("parameterIterator", {}).get("items", {}).get("raw", "")
    for placeholder in _PLACEHOLDER.findall(items):
        remedy = f"a cluster does not resolve {placeholder} in what a loop goes over; pass it beside the loop's item"
        yield Finding(task=task.path, place="items of the loop", value=items, remedy=remedy)


def _of_an_input(placeholder: str) -> str:
    if placeholder in _WHOLE:
        return f"{placeholder} is resolved only where it is the whole value; pass it as an input of its own"
    if _INPUT.fullmatch(placeholder):
        return "a value inside a longer one is substituted by chance; pass both and join them in the program"
    return f"a cluster does not resolve {placeholder} in an input; leave it out, or pass what it stands for"


def _caching(task: Task) -> Iterator[Finding]:
    if "container" not in (task.executor or {}):
        return
    options = task.spec.get("cachingOptions")
    if options is None or options.get("enableCache"):
        yield Finding(
            task=task.path, place="cachingOptions", value="absent" if options is None else "enableCache: true",
            remedy="KFP's cache compares addresses and hides a file that changed; .set_caching_options(False)",
        )  # fmt: skip


def _program(task: Task) -> Iterator[Finding]:
    container = (task.executor or {}).get("container")
    if container is None:
        if "importer" not in (task.executor or {}):
            kinds = ", ".join(task.executor or {}) or "nothing"
            yield Finding(task=task.path, place="executor", value=kinds, remedy="a cluster runs containers alone")
        return
    for variable in container.get("env", []):
        if _PLACEHOLDER.search(variable.get("value", "")):
            yield Finding(
                task=task.path, place=f"env {variable.get('name', '')}", value=variable["value"],
                remedy="no placeholder is resolved in a variable; pass the value as an input",
            )  # fmt: skip
    for place in ("command", "args"):
        for number, text in enumerate(container.get(place, [])):
            yield from _argument(task, f"{place}[{number}]", text)


def _argument(task: Task, place: str, text: str) -> Iterator[Finding]:
    if len(text.encode()) > NEAR * ARGUMENT_BYTES:
        yield _too_long(task.path, place, len(text.encode()))
    if text.startswith(('{"Concat":', '{"IfPresent":')):
        with suppress(ValueError):  # text of the program's own that only begins like KFP's
            yield from _structure(task, place, json.loads(text))
            return
    for match in _PLACEHOLDER.findall(text):
        if not _ARGUMENT.fullmatch(match):
            remedy = f"a cluster does not resolve {match} in an argument; make it an input, as a whole value"
            yield Finding(task=task.path, place=place, value=text, remedy=remedy)


def _structure(task: Task, place: str, part: Any) -> Iterator[Finding]:
    """KFP's conditional and joined arguments, at any depth; other JSON is the program's own."""
    if isinstance(part, str):
        yield from _argument(task, place, part)
    elif isinstance(part, list):
        for each in part:
            yield from _structure(task, place, each)
    elif isinstance(part, dict) and "Concat" in part:
        remedy = "the program gets this JSON itself; pass the parts, and join them there"
        yield Finding(task=task.path, place=place, value=json.dumps(part), remedy=remedy)
    elif isinstance(part, dict) and isinstance(condition := part.get("IfPresent"), dict):
        if condition.get("InputName") in task.component.get("inputDefinitions", {}).get("artifacts", {}):
            remedy = "of an artifact a cluster always takes Else; pass the artifact, and look in the program"
            yield Finding(task=task.path, place=place, value=json.dumps(part), remedy=remedy)
        elif "$.outputs" in json.dumps(part):
            remedy = "it is not resolved beside an output; pass both, and decide in the program"
            yield Finding(task=task.path, place=place, value=json.dumps(part), remedy=remedy)
        for branch in ("Then", "Else"):
            yield from _structure(task, place, condition.get(branch, []))


def _image(task: Task, require_digests: bool) -> Iterator[Finding]:
    image = (task.executor or {}).get("container", {}).get("image", "")
    placeholders = _PLACEHOLDER.findall(image)
    if placeholders and not _INPUT.fullmatch(image):
        remedy = "an image is one input of the task, whole, or fixed"
        yield Finding(task=task.path, place="image", value=image, remedy=remedy)
    elif placeholders and require_digests:
        remedy = "whoever starts the run chooses it, so no digest can be required; fix it with --image NAME@sha256:…"
        yield Finding(task=task.path, place="image", value=image, remedy=remedy)
    elif image and require_digests and not _DIGEST.fullmatch(image):
        remedy = "a tag is a name that moves; write NAME@sha256:…, which `docker inspect` shows after a push"
        yield Finding(task=task.path, place="image", value=image, remedy=remedy)


def _resources(task: Task, spec: dict[str, Any]) -> Iterator[Finding]:
    """What an input decides: the driver reads its text, and of a number that there is none."""
    inputs = spec["root"].get("inputDefinitions", {}).get("parameters", {})
    for text in _texts((task.executor or {}).get("container", {}).get("resources")):
        if not _PLACEHOLDER.search(text):
            continue
        if not (whole := _INPUT.fullmatch(text)):
            yield Finding(
                task=task.path,
                place="resources",
                value=text,
                remedy="a resource is one input of the task, whole, or fixed",
            )
            continue
        given = task.spec.get("inputs", {}).get("parameters", {}).get(whole["name"], {})
        above = inputs.get(given.get("componentInputParameter", "").removeprefix(_CHANNEL), {})
        if above.get("parameterType", "STRING") != "STRING":
            yield Finding(
                task=task.path, place="resources", value=f"{text}, a {above['parameterType']}",
                remedy="a cluster reads no numbers here: let the pipeline's input be text",
            )  # fmt: skip


def _retries(task: Task) -> Iterator[Finding]:
    policy = task.spec.get("retryPolicy", {})
    longest_s = float(str(policy.get("backoffMaxDuration", "0s")).removesuffix("s"))
    if policy.get("maxRetryCount") and longest_s <= _KFPS_LONGEST_S:
        remedy = (
            "Argo counts it from the beginning of the first attempt, and ends later ones then; backoff_max_duration=…"
        )
        yield Finding(task=task.path, place="retryPolicy.backoffMaxDuration", value=f"{longest_s:g}s", remedy=remedy)


def _oversized(text: str, spec: dict[str, Any]) -> Iterator[Finding]:
    if (size := len(text.encode())) >= SPEC_BYTES:
        remedy = f"a specification stays below {SPEC_BYTES:,} bytes; put what is large into a file that a stage reads"
        yield Finding(task="", place="size", value=f"{size:,} bytes", remedy=remedy)
    for name, component in {"root": spec["root"], **spec.get("components", {})}.items():
        if (size := _bytes(component)) > NEAR * ARGUMENT_BYTES:  # the driver gets it as one argument
            yield _too_long("", f"component {name}", size)


def _oversized_input(task: Task, spec: dict[str, Any]) -> Iterator[Finding]:
    """The executor input is one argument: what is known of it, and an assumption for each artifact."""
    definitions = task.component.get("inputDefinitions", {})
    defaults = spec["root"].get("inputDefinitions", {}).get("parameters", {})
    values: dict[str, Any] = {}
    for name, given in task.spec.get("inputs", {}).get("parameters", {}).items():
        above = defaults.get(given.get("componentInputParameter", "").removeprefix(_CHANNEL), {})
        values[name] = given.get("runtimeValue", {}).get("constant", above.get("defaultValue", ""))
    outputs = task.component.get("outputDefinitions", {})
    artifacts = len(definitions.get("artifacts", {})) + len(outputs.get("artifacts", {}))
    size = _bytes(values) + artifacts * _ARTIFACT_BYTES
    if task.executor is not None and size > NEAR * ARGUMENT_BYTES:
        yield _too_long(task.path, "executor input", size)


def _too_long(task: str, place: str, size: int) -> Finding:
    remedy = f"one argument ends at {ARGUMENT_BYTES:,}, and what is added as it runs counts; pass the address of a file"
    return Finding(task=task, place=place, value=f"{size:,} bytes", remedy=remedy)


def _bytes(value: Any) -> int:
    return len(json.dumps(value).encode())


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
