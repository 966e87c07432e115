"""Arguments of a pipeline, checked against the inputs that its own specification declares.

kfp's client sends whatever it is given, and its command line sends everything as text; the server then refuses a run
for which things were already created. Here a wrong name, type or choice and a missing value are found before.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from reflux.components import declare, overrides
from reflux.components.kubeflow import pods
from reflux.pipelines import ir_lint, recipes
from reflux.pipelines.recipes import Recipe

Definitions = Mapping[str, Mapping[str, Any]]
"""Input -> what the specification says of it: parameterType, defaultValue, isOptional, literals."""

OVERRIDES = "overrides"
"""The pipeline's input that changes fields of stages: stage -> {field: value}."""

_TYPES: dict[str, tuple[tuple[type[Any], ...], str]] = {
    "STRING": ((str,), "text"),
    "NUMBER_INTEGER": ((int, float), "a whole number"),
    "NUMBER_DOUBLE": ((int, float), "a number"),
    "BOOLEAN": ((bool,), "true or false"),
    "LIST": ((list,), "a list, in JSON"),
    "STRUCT": ((dict,), 'a table, in JSON, e.g. {"distill": {"max_steps": 2}}'),
}


def parse(definitions: Definitions, texts: Iterable[str]) -> dict[str, Any]:
    """`NAME=VALUE` as written on the command line, each value in the type of its input. ValueError names the input."""
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--arg {text!r}: write NAME=VALUE; inputs are {', '.join(definitions)}")
        values[name.strip()] = _parsed(name.strip(), _known(definitions, name.strip()), value.strip())
    return values


def check(definitions: Definitions, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as KFP wants them. ValueError for a wrong name, type or choice and for inputs without a value."""
    checked = {name: _checked(name, _known(definitions, name), value) for name, value in values.items()}
    missing = [name for name in required(definitions) if name not in values]
    if missing:
        raise ValueError(f"no value for {', '.join(missing)}, which this pipeline needs: --arg {missing[0]}=VALUE")
    _require_room(checked)
    return checked


def check_overrides(recipe: Recipe, values: Mapping[str, Any]) -> None:
    """What `overrides` changes of the recipe, checked as every stage will, and the accelerators that its pods ask for.
    ValueError names stage and field.
    """
    pods.check_accelerators(values.get("accelerator", ""), values.get("accelerators", "1"))
    changes = values.get(OVERRIDES, {})
    try:
        overrides.require_no_sources(changes)
        recipes.overridden(recipe, changes)
    except ValueError as error:
        raise ValueError(f"argument {OVERRIDES}: {error}") from None


def required(definitions: Definitions) -> list[str]:
    """The inputs without a default."""
    return [
        name
        for name, definition in definitions.items()
        if "defaultValue" not in definition and not definition.get("isOptional")
    ]


def _known(definitions: Definitions, name: str) -> Mapping[str, Any]:
    if name not in definitions:
        if not definitions:
            raise ValueError(f"argument {name}: this pipeline has no inputs")
        near = declare.nearest(name, definitions)
        raise ValueError(
            f"argument {name}: no such input; did you mean {near}? The pipeline's inputs: {', '.join(definitions)}"
        )
    return definitions[name]


def _parsed(name: str, definition: Mapping[str, Any], text: str) -> Any:
    kind = definition["parameterType"]
    if kind == "STRING":
        return text
    try:
        return json.loads(text.lower() if kind == "BOOLEAN" else text)
    except (ValueError, RecursionError):
        raise _wrong(name, kind, text) from None


def _checked(name: str, definition: Mapping[str, Any], value: Any) -> Any:
    kind = definition["parameterType"]
    if kind not in _TYPES:
        raise ValueError(f"argument {name}: inputs of type {kind} cannot be given from outside")
    types, _ = _TYPES[kind]
    if not isinstance(value, types) or isinstance(value, bool) != (kind == "BOOLEAN"):  # bool is an int to Python
        raise _wrong(name, kind, value)
    if not _is_json(value):
        raise _wrong(name, kind, value)
    if kind == "NUMBER_INTEGER":
        if value != int(value) or abs(value) > declare.LARGEST_INT:
            raise _wrong(name, kind, value)
        value = int(value)
    choices = definition.get("literals")
    if choices and value not in choices:
        raise ValueError(f"argument {name}: {value!r} is not one of {', '.join(map(str, choices))}")
    return value


def _require_room(values: Mapping[str, Any]) -> None:
    """KFP's driver gets all of them as one argument of its command line."""
    sizes = {name: len(json.dumps(value).encode()) for name, value in values.items()}
    if sum(sizes.values()) > ir_lint.NEAR * ir_lint.ARGUMENT_BYTES:
        longest = max(sizes, key=sizes.__getitem__)
        raise ValueError(
            f"arguments of {sum(sizes.values()):,} bytes, of which {longest} {sizes[longest]:,}: all together stay "
            f"below {ir_lint.NEAR * ir_lint.ARGUMENT_BYTES:,.0f}; put what is long into a file that a stage reads"
        )


def _is_json(value: Any) -> bool:
    """Whether it can be sent: dates, which YAML reads, and infinite numbers, which Python's JSON reads, cannot."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _wrong(name: str, kind: str, value: Any) -> ValueError:
    return ValueError(f"argument {name}: {value!r} is not {_TYPES[kind][1]}")
