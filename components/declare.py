"""One frozen dataclass per stage, three uses: KFP component, command line, and the key under which results are stored.

A stage's `config.py` holds the only definition of its parameters. This module turns it into a KFP container component
(`container_component`), into flags (`to_argparse`), and into the three groups that the store cares about: key fields
change the result and are hashed, settings (`setting`) cannot change it, and sources (`source`) name something whose
content, not whose address, is hashed. KFP is imported only when a component is first put into a pipeline, so that a
stage's container and `--help` start without it.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import json
import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_type_hints

from reflux.components.kubeflow import kfp_task
from reflux.components.kubeflow.kfp_task import REQUIRED

IMAGE = "reflux-python-cpu:0.1.0"
"""Image of every stage unless the pipeline names another. kfp warns where "python" is not in the name."""

PLATFORM_PARAMETERS = {
    "store": "Root of the store: file:///dir, /dir or s3://bucket/prefix.",
    "run": "Name of the pipeline run that this stage belongs to; where it is empty, `job` is.",
    "job": "Id that KFP gives the run.",
    "overrides": "What a person changes, {stage: {field: value}}: the stage lays its own part over its fields.",
}
JOB_PARAMETERS = {"train_job": dict, "accelerator": str, "accelerators": str}
"""What a task has besides where several pods do its work (train_job.py): all that their job needs to know."""
SHOWN = ("metrics", "summary")
"""Artifacts of every stage whose bytes KFP's UI shows: its numbers, and a page in Markdown."""

LARGEST_INT = 2**53
"""KFP hands numbers over as JSON doubles."""

_SCALARS: dict[type, str] = {str: "text", int: "a whole number", float: "a finite number", bool: "true or false"}
_LISTS: dict[Any, type] = {list[item]: item for item in (str, int, float)}  # type: ignore[valid-type]

Config = TypeVar("Config")


def source(default: str = "") -> Any:
    """A field that holds a URI or hub id whose content, by digest, is a parent of the result. "" means none."""
    return dataclasses.field(default=default, metadata={"role": "source"})


def setting(default: Any, choices: Sequence[str] = ()) -> Any:
    """A field that cannot change the result: device, workers, how often a checkpoint is written."""
    metadata = {"role": "setting", "choices": tuple(choices)}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def choice(default: str, choices: Sequence[str]) -> Any:
    """A field that is one of a few names: a drop-down in a form; `check_choices` refuses any other."""
    return dataclasses.field(default=default, metadata={"choices": tuple(choices)})


def later(default: Any, choices: Sequence[str] = ()) -> Any:
    """A key field that a stage got after results had been made. Its default says what was done before, and is not
    hashed: those results are still found. `choices` as of `choice`.
    """
    return dataclasses.field(default=default, metadata={"later": True, "choices": tuple(choices)})


def choices(config_class: type) -> dict[str, tuple[str, ...]]:
    """Field name -> the values allowed, of every field that has choices."""
    return {f.name: f.metadata["choices"] for f in dataclasses.fields(config_class) if f.metadata.get("choices")}


def check_choices(config: Any) -> None:
    """For a config's `__post_init__`. ValueError names field, value and what is allowed."""
    for name, allowed in choices(type(config)).items():
        if getattr(config, name) not in allowed:
            raise ValueError(
                f"{_label(type(config))}.{name} {getattr(config, name)!r}: allowed are {', '.join(allowed)}"
            )


def key_fields(config: Any) -> dict[str, Any]:
    """The fields that change the result: plain dataclass fields."""
    return _fields_of_role(config, "key")


def hashed_fields(config: Any) -> dict[str, Any]:
    """Those of them that the key and the manifest of a result have: all but `later` ones that nobody has set."""
    unset = later_fields(type(config))
    return {name: value for name, value in key_fields(config).items() if name not in unset or value != unset[name]}


def later_fields(config_class: type) -> dict[str, Any]:
    """Name and default of the fields made by `later`: at it, neither a key nor a manifest has them."""
    return {f.name: f.default for f in dataclasses.fields(config_class) if f.metadata.get("later")}


def other_fields(config: Any) -> dict[str, Any]:
    """The settings: recorded beside a result, not part of its key."""
    return _fields_of_role(config, "setting")


def source_fields(config: Any) -> dict[str, str]:
    """Field name -> URI of every source that is given."""
    return {name: uri for name, uri in _fields_of_role(config, "source").items() if uri}


def field_docs(config_class: type) -> dict[str, str]:
    """Field name -> the docstring literal under it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(config_class))).body[0].body  # type: ignore[attr-defined]
    docs: dict[str, str] = {}
    for node, follower in itertools.pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(follower, ast.Expr):
            docs[node.target.id] = inspect.cleandoc(ast.literal_eval(follower.value))
    return docs


def nearest(name: str, known: Collection[str]) -> str:
    """The known names that a person may have meant: all that contain each word of it, else the one most like it.

    lr -> warmup_policy_lr, joint_policy_lr or joint_student_lr; max_step -> max_steps
    """
    words = set(name.split("_"))
    containing = [each for each in known if words <= set(each.split("_"))]
    if not containing:
        return difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]
    return " or ".join(filter(None, (", ".join(containing[:-1]), containing[-1])))


def from_mapping(config_class: type[Config], mapping: Mapping[str, Any]) -> Config:
    """A config from JSON-like values, as KFP delivers them (10.0 for the int 10).

    ValueError names the field, the value and what is allowed: an unknown name, a missing one, a wrong type, or what the
    config's own `__post_init__` refuses.
    """
    types = _types(config_class)
    values = {
        name: _coerce(config_class, name, _known_type(config_class, name, types), value)
        for name, value in mapping.items()
    }
    required = {f.name for f in dataclasses.fields(config_class) if _default(f) is REQUIRED}  # type: ignore[arg-type]
    missing = sorted(required - values.keys())
    if missing:
        raise ValueError(f"{_label(config_class)}: no value for {', '.join(missing)}, which has no default")
    return config_class(**values)


def parse_value(config_class: type, name: str, text: str) -> Any:
    """The value of field `name` written as text: `true`, `3`, `a,b` or a JSON list. ValueError as in `from_mapping`."""
    kind = _known_type(config_class, name, _types(config_class))
    refusal = ValueError(f"{_label(config_class)}.{name}: {text!r} is not {_meaning(kind)}")
    try:
        if kind in _LISTS:
            is_json = text.lstrip().startswith("[")
            value = json.loads(text) if is_json else [_scalar(_LISTS[kind], item) for item in text.split(",") if item]
        else:
            value = _scalar(kind, text)
    except ValueError:
        raise refusal from None
    return _coerce(config_class, name, kind, value)


def to_argparse(config_class: type, parser: argparse.ArgumentParser) -> None:
    """Add one flag per field. A flag not given is absent from the namespace: `from_mapping` applies the default."""
    docs, allowed = field_docs(config_class), choices(config_class)
    for f in dataclasses.fields(config_class):
        default = _default(f)
        required = default is REQUIRED
        note = "(required)" if required else f"(default: {json.dumps(default)})"
        parser.add_argument(
            flag(f.name),
            dest=f.name,
            type=_argparse_type(config_class, f.name),
            required=required,
            default=argparse.SUPPRESS,
            metavar="|".join(allowed.get(f.name, ())) or _meaning(_types(config_class)[f.name]).split()[-1].upper(),
            help=f"{docs.get(f.name, '')} {note}".strip().replace("%", "%%"),
        )


def flag(name: str) -> str:
    """top_k -> --top-k"""
    return "--" + name.replace("_", "-")


def container_component(
    name: str,
    config_class: type,
    *,
    inputs: Collection[str] = (),
    outputs: Collection[str] = (),
    html: Mapping[str, str] | None = None,
    image: str | None = None,
    ends_run: bool = False,
    registers: str = "",
    distributed: bool = False,
    several: Collection[str] = (),
) -> Component:
    """Declare stage `name`: its parameters are the config's fields and those of the platform, its artifact a manifest.

    `name` is the stage's folder under reflux.components, or the dotted package of a stage that lives elsewhere. `html`
    are pages that KFP shows beside `metrics` and `summary`, which every stage has: name -> shard of the stage's
    artifact. `ends_run`: the stage is the last, its digest is the root of the run and its metric verdict.pass the
    verdict. `registers`: the input that becomes a version of the model which the config's field registered_model
    names, if the verdict is a pass. `distributed`: torchrun may start it in several processes. `several`: inputs that
    are lists, of one artifact or more. ValueError for names that clash and for field types that KFP cannot carry.
    """
    html = dict(html or {})
    if len(outputs) != 1:
        raise ValueError(f"{name}: a stage writes exactly one artifact, not {list(outputs)}")
    for name_of_field, kind in _types(config_class).items():
        label = f"{_label(config_class)}.{name_of_field}"
        if kind not in _SCALARS and kind not in _LISTS:
            raise ValueError(
                f"{label}: type {kind} is not allowed; use str, int, float, bool, list[str], list[int] or list[float]"
            )
        if name_of_field in {*inputs, *outputs, *html, *SHOWN, *PLATFORM_PARAMETERS, *JOB_PARAMETERS, "image"}:
            raise ValueError(f"{label}: the name is taken by an artifact or by a parameter of every stage")
    return Component(
        name=name,
        config_class=config_class,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        html=html,
        image=image,
        ends_run=ends_run,
        registers=registers,
        distributed=distributed,
        several=tuple(several),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Component:
    """A declared stage, as pipelines see it."""

    name: str
    config_class: type
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    html: Mapping[str, str]
    """Page -> the shard that it is."""
    image: str | None
    ends_run: bool
    registers: str
    distributed: bool
    several: tuple[str, ...]

    def __call__(self, config: Any = None, *, image: str = "", place: Any = None, **arguments: Any) -> Any:
        """KFP's task, inside a pipeline: `config` is baked in as constants, and `arguments` go before it.

        `image` and `place` are `kfp_task.started`'s.
        """
        constants = {} if config is None else key_fields(config) | other_fields(config) | source_fields(config)
        kfp = self.kfp_of_a_job if "train_job" in arguments else self.kfp
        return kfp_task.started(kfp, image, place, constants | arguments)

    @functools.cached_property
    def kfp(self) -> Any:
        """The KFP container component."""
        return kfp_task.component(self.name, self._parameters(), doc=self._docstring(), image=self.image or IMAGE)

    @functools.cached_property
    def kfp_of_a_job(self) -> Any:
        """The same, that has several pods do the work."""
        parameters = [*self._parameters(), *((name, kind, REQUIRED) for name, kind in JOB_PARAMETERS.items())]
        return kfp_task.component(self.name, parameters, doc=self._docstring(), image=self.image or IMAGE)

    def _parameters(self) -> Iterator[tuple[str, Any, Any]]:
        from kfp import dsl

        kinds = {False: dsl.Input[dsl.Dataset], True: dsl.Input[list[dsl.Dataset]]}
        yield from ((name, kinds[name in self.several], REQUIRED) for name in self.inputs)
        yield from ((name, dsl.Output[dsl.Dataset], REQUIRED) for name in self.outputs)
        yield "metrics", dsl.Output[dsl.Metrics], REQUIRED
        yield "summary", dsl.Output[dsl.Markdown], REQUIRED
        yield from ((name, dsl.Output[dsl.HTML], REQUIRED) for name in self.html)
        yield from (("store", str, REQUIRED), ("run", str, REQUIRED), ("job", str, ""), ("overrides", dict, {}))
        types = _types(self.config_class)
        yield from ((f.name, types[f.name], _default(f)) for f in dataclasses.fields(self.config_class))

    def _docstring(self) -> str:
        docs = PLATFORM_PARAMETERS | field_docs(self.config_class)
        lines = [f"    {name}: {' '.join(text.split())}" for name, text in docs.items()]
        return "\n".join([inspect.cleandoc(self.config_class.__doc__ or ""), "", "Args:", *lines])


def _fields_of_role(config: Any, role: str) -> dict[str, Any]:
    """Values in their declared type, so that lr=1 written in Python and 1.0 delivered by KFP are one key."""
    cls = type(config)
    types = _types(cls)
    fields = (f for f in dataclasses.fields(config) if f.metadata.get("role", "key") == role)
    return {f.name: _coerce(cls, f.name, types[f.name], getattr(config, f.name)) for f in fields}


def _types(config_class: type) -> dict[str, Any]:
    return get_type_hints(config_class)


def _label(config_class: type) -> str:
    """DistillConfig -> distill: people write `distill.top_k`, not the class."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", config_class.__name__.removesuffix("Config")).lower()


def _known_type(config_class: type, name: str, types: Mapping[str, Any]) -> Any:
    known = [f.name for f in dataclasses.fields(config_class)]
    if name not in known:
        near = f"did you mean {nearest(name, known)}? " if known else ""
        raise ValueError(f"{_label(config_class)}.{name}: no such field; {near}Known: {', '.join(known)}")
    return types[name]


def _meaning(kind: Any) -> str:
    return _SCALARS[kind] if kind in _SCALARS else f"a list of {_SCALARS[_LISTS[kind]].removeprefix('a ')} values"


def _default(f: dataclasses.Field[Any]) -> Any:
    if f.default_factory is not dataclasses.MISSING:
        return f.default_factory()
    return REQUIRED if f.default is dataclasses.MISSING else f.default


def _coerce(config_class: type, name: str, kind: Any, value: Any) -> Any:
    refusal = ValueError(f"{_label(config_class)}.{name}: {value!r} is not {_meaning(kind)}")
    if kind in _LISTS:
        if not isinstance(value, list):
            raise refusal
        return [_coerce(config_class, name, _LISTS[kind], item) for item in value]
    if isinstance(value, bool) != (kind is bool):  # bool is an int to Python, not to people
        raise refusal
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if kind is int and isinstance(value, int) and abs(value) > LARGEST_INT:
        raise ValueError(f"{_label(config_class)}.{name}: {value} is beyond 2^53, which KFP does not carry exactly")
    if kind is float and isinstance(value, int | float):
        if not math.isfinite(value):
            raise refusal
        return float(value)
    if not isinstance(value, kind):
        raise refusal
    return value


def _scalar(kind: type, text: str) -> Any:
    if kind is not bool:
        return kind(text)
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _argparse_type(config_class: type, name: str) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return parse_value(config_class, name, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert
