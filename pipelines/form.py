"""What KFP's form can show of a pipeline and its SDK cannot say: drop-downs, and defaults that only the caller knows.

KFP 2.17's SDK refuses typing.Literal, but its IR, API server (2.16) and UI (2.17) know `literals`: a select box, and a
refusal of any other value before the run begins. So the field is written into the compiled specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def with_choices(pipeline: Any, choices: dict[str, Sequence[str]]) -> Any:
    """The pipeline, whose text parameters of these names are one of these values each."""
    for name, allowed in choices.items():
        parameter = pipeline.pipeline_spec.root.input_definitions.parameters[name]
        for value in allowed:
            parameter.literals.add().string_value = value
    return pipeline


def with_default(pipeline: Any, name: str, value: str) -> Any:
    """The pipeline, whose text parameter of that name need not be given."""
    parameter = pipeline.pipeline_spec.root.input_definitions.parameters[name]
    parameter.default_value.string_value = value
    parameter.is_optional = True
    return pipeline
