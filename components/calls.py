"""What one execution of a stage was asked to do: by KFP's executor input, or by flags, which say the same."""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import reflux.components
from reflux.components import declare, overrides
from reflux.components.declare import Component
from reflux.components.kubeflow import kfp_executor
from reflux.components.kubeflow.kfp_executor import Location

_PLACE = ("store", "run")  # what every call has to say
_KEY = re.compile(r"objects/[^/]+/[0-9a-f]{64}/manifest\.json")


@dataclass(frozen=True, kw_only=True)
class Call:
    """What one execution of a stage was asked to do, whoever asked."""

    config: Any
    store: str
    run: str
    job: str = ""
    """Id that KFP gave the run."""
    inputs: Mapping[str, Location]
    outputs: Mapping[str, Location]
    executor_output: Path | None = None
    train_job: Mapping[str, Any] = field(default_factory=dict)
    """What the pods of a TrainJob are asked for that does the work; {} is to work here."""


def stages() -> list[str]:
    """The stages that ship with reflux: the folders that declare a component."""
    folders = (m.name for m in pkgutil.iter_modules(reflux.components.__path__) if m.ispkg)
    return sorted(name for name in folders if find_spec(f"reflux.components.{name}.component"))


def load(package: str) -> Component:
    """The declaration of a stage. ValueError for an unknown name, with the nearest known one."""
    if "." not in package and package not in stages():
        near = declare.nearest(package, stages())
        raise ValueError(f"no such stage; did you mean {near}? Known: {', '.join(stages())}")
    return getattr(importlib.import_module(f"{package_of(package)}.component"), package.rpartition(".")[2])


def parse(component: Component, flags: list[str]) -> Call:
    """A call from KFP's executor input or from flags."""
    if flags and flags[0] == "--executor-input":
        return _from_kfp(component, executor_input(flags))
    return _from_flags(component, flags)


def executor_input(flags: list[str]) -> kfp_executor.ExecutorInput:
    """What KFP asks for. ValueError if the flags are no executor input."""
    if len(flags) != 2 or flags[0] != "--executor-input":
        raise ValueError("--executor-input: takes one JSON document and no other flag")
    return kfp_executor.read(flags[1])


def _from_kfp(component: Component, asked: kfp_executor.ExecutorInput) -> Call:
    values = dict(asked.parameters)
    store, run, job, changes = (values.pop(name, None) for name in declare.PLATFORM_PARAMETERS)
    of_a_job = {name: values.pop(name) for name in declare.JOB_PARAMETERS if name in values}
    stage = component.name.rpartition(".")[2]
    call = Call(
        config=overrides.own_part(stage, component.config_class, values, changes or {}),
        store=str(store or ""),
        run=str(run or job or ""),
        job=str(job or ""),
        inputs=asked.inputs,
        outputs=asked.outputs,
        executor_output=asked.output_file,
        train_job={**of_a_job.pop("train_job"), **of_a_job} if of_a_job else {},
    )
    return _complete(component, call)


def _from_flags(component: Component, flags: list[str]) -> Call:
    stage = component.name.rpartition(".")[2]
    parser = argparse.ArgumentParser(
        prog=f"reflux {stage}", description=component.config_class.__doc__, allow_abbrev=False
    )
    for name in _PLACE:
        parser.add_argument(declare.flag(name), required=True, help=declare.PLATFORM_PARAMETERS[name])
    parser.add_argument("--job", default="", help=declare.PLATFORM_PARAMETERS["job"])
    for name in component.inputs:
        many: dict[str, Any] = {"nargs": "+"} if name in component.several else {}
        parser.add_argument(
            declare.flag(name),
            required=True,
            type=Path,
            metavar="MANIFEST",
            help=f"Input {name}, or its key in the store.",
            **many,
        )
    shown_pages = (*declare.SHOWN, *component.html)
    for name in (*component.outputs, *shown_pages):
        page = name in shown_pages
        parser.add_argument(
            declare.flag(f"out_{name}"),
            required=not page,
            type=Path,
            metavar="PATH",
            help=f"Where to put {'what is shown as' if page else 'the manifest of'} {name}.",
        )
    declare.to_argparse(component.config_class, parser)
    values = vars(parser.parse_args(flags))
    at = {name: values.pop(name) for name in (*_PLACE, "job")}
    inputs: dict[str, Path] = {}
    for name in component.inputs:
        paths = values.pop(name)
        inputs |= (
            {f"{name}/{n}": path for n, path in enumerate(paths, 1)} if name in component.several else {name: paths}
        )
    outputs = {name: values.pop(f"out_{name}") for name in (*component.outputs, *shown_pages)}
    call = Call(
        config=declare.from_mapping(component.config_class, values),
        inputs={name: Location(uri=str(path), path=path) for name, path in inputs.items()},
        outputs={name: Location(uri=str(path), path=path) for name, path in outputs.items() if path},
        **at,
    )
    return _complete(component, call)


def _complete(component: Component, call: Call) -> Call:
    """The call, if nothing that every stage needs is missing from it."""
    for name in _PLACE:
        if not getattr(call, name):
            raise ValueError(f"{name}: must not be empty. {declare.PLATFORM_PARAMETERS[name]}")
    for name in component.inputs:
        if not given_for(name, call.inputs):
            raise ValueError(f"input {name}: no manifest there (not given)")
    for name, place in call.inputs.items():
        if not place.path.is_file() and not _KEY.fullmatch(str(place.path)):
            raise ValueError(f"input {name}: no manifest there ({place.path})")
    return call


def as_flags(component: Component, call: Call, parents: Mapping[str, Any]) -> list[str]:
    """The call as another machine can make it that sees the same store."""
    from reflux.components.artifacts import manifest_key

    config = declare.key_fields(call.config) | declare.other_fields(call.config) | declare.source_fields(call.config)
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in config.items()}
    texts |= {name: manifest_key(parent.stage, parent.key) for name, parent in parents.items()}
    texts |= {"store": call.store, "run": call.run, "job": call.job}
    texts |= {f"out_{name}": f"/tmp/{name}.json" for name in component.outputs}
    return [f"{declare.flag(name)}={text}" for name, text in texts.items()]


def given_for(name: str, inputs: Mapping[str, Any]) -> list[Any]:
    """What was given for an input: one, or each of a list."""
    return [value for given, value in inputs.items() if given == name or given.startswith(f"{name}/")]


def package_of(package: str) -> str:
    """The dotted package of a stage that may be named by its folder alone."""
    return package if "." in package else f"reflux.components.{package}"
