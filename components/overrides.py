"""What a person changes in the configuration of a run: sources, which a whole run has one of, and fields of stages.

    {"teacher": "ORG/NAME", "distill": {"max_steps": 2}}

is what options and files of the command line come to. In Kubeflow's form each source is a parameter of its own, and the
rest is one parameter, `overrides`: every stage gets it whole and takes its own part, because a cluster resolves no
placeholder inside a longer value. The rules are here for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from reflux.components import declare

SOURCES = ("teacher", "student", "prompts_uri", "labels_uri", "eval_text_uri", "entity_model", "start_uri")
"""What a whole run has one of, and several stages read."""

KUBERNETES = "kubernetes"
"""The table of what pods ask for (pods.py), beside those of the stages."""

Changes = Mapping[str, Any]
"""A source's name -> its URI, or a stage's name -> {field: value}."""

Config = TypeVar("Config")


def laid_over(configs: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """The configs (by stage) with values replaced, each checked against its field. ValueError names the nearest known
    name.
    """
    types = {stage: type(config) for stage, config in configs.items()}
    values: dict[str, dict[str, Any]] = {}
    for name, change in changes.items():
        if known(name, types) in SOURCES:
            for stage, source_field in fields_of(name, types):
                values.setdefault(stage, {})[source_field] = change
        else:
            values.setdefault(name, {}).update(_own_fields(types[name], name, change))
    changed = {stage: declare.from_mapping(types[stage], asdict(configs[stage]) | own) for stage, own in values.items()}
    return {**configs, **changed}


def own_part(stage: str, config_class: type[Config], values: Mapping[str, Any], overrides: Changes) -> Config:
    """The config of one stage from its values and its part of the overrides of a run. ValueError as in `laid_over`."""
    require_no_sources(overrides)
    return declare.from_mapping(config_class, {**values, **_own_fields(config_class, stage, overrides.get(stage, {}))})


def require_no_sources(overrides: Changes) -> None:
    """ValueError unless every part belongs to a stage: sources are parameters of the pipeline, and what pods ask for is
    read before any stage starts.
    """
    for name in overrides:
        if name in SOURCES:
            raise ValueError(f"overrides.{name}: is a parameter of the run itself; set it there")
        if name == KUBERNETES:
            raise ValueError(f"overrides.{name}: is fixed when a pipeline is compiled; give it there, with --config")


def known(name: str, stages: Mapping[str, type]) -> str:
    """The name, if it is a stage's or a source's. ValueError with the nearest one that is."""
    names = [*stages, *SOURCES]
    if not isinstance(name, str):  # YAML has keys of other types
        raise ValueError(f"{name!r}: the name of a stage or a source is expected. Known: {', '.join(names)}")
    if name not in names:
        near = declare.nearest(name, names)
        raise ValueError(f"{name}: no such stage or source; did you mean {near}? Known: {', '.join(names)}")
    return name


def fields_of(source: str, stages: Mapping[str, type]) -> list[tuple[str, str]]:
    """(stage, field) of every field that the source fills: of `student`, those called student or student_uri."""
    return [
        (stage, f.name)
        for stage, config_class in stages.items()
        for f in fields(config_class)
        if f.metadata.get("role") == "source" and f.name.removesuffix("_uri") == source.removesuffix("_uri")
    ]


def _own_fields(config_class: type, stage: str, change: Any) -> Mapping[str, Any]:
    if not isinstance(change, Mapping):
        raise ValueError(f"{stage}: a table of fields is expected, not {change!r}")
    for name in change:
        if not isinstance(name, str):
            raise ValueError(f"{stage}: the name of a field is expected, not {name!r}")
    for f in fields(config_class):
        if f.metadata.get("role") == "source" and f.name in change:
            source = f.name.removesuffix("_uri")
            raise ValueError(
                f"{stage}.{f.name}: the whole run has one {source}; set it with {declare.flag(source)}, or in the form"
            )
    return change
