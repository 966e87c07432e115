"""What people write into one struct of Kubeflow's form, and what a stage makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from reflux.components import overrides
from reflux.components.distill.config import DistillConfig
from reflux.pipelines import recipes

VALUES: dict[str, Any] = {"teacher": "t", "student_uri": "s", "max_steps": 7.0}


def test_a_stage_takes_its_own_part() -> None:
    changes = {"distill": {"max_steps": 10.0}, "evaluate": {"windows": 1.0}}
    config = overrides.own_part("distill", DistillConfig, VALUES, changes)
    assert config == DistillConfig(teacher="t", student_uri="s", max_steps=10)
    assert type(config.max_steps) is int
    assert overrides.own_part("distill", DistillConfig, VALUES, {}).max_steps == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distill": {"max_steps": 10.5}}, r"distill\.max_steps: 10\.5 is not a whole number"),
        ({"distill": {"max_step": 1}}, r"distill\.max_step: no such field; did you mean max_steps"),
        ({"distill": {"max_steps": "2"}}, r"distill\.max_steps: '2' is not a whole number"),
        ({"distill": {"beta": 2}}, r"distill\.beta 2\.0: must be in \[0, 1\]"),
        ({"distill": 3}, "distill: a table of fields is expected, not 3"),
        ({"distill": {"teacher": "x"}}, r"distill\.teacher: the whole run has one teacher"),
        ({"distill": {1: 2}}, "distill: the name of a field is expected, not 1"),
        ({"teacher": "x"}, r"overrides\.teacher: is a parameter of the run itself"),
    ],
)
def test_a_wrong_override_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        overrides.own_part("distill", DistillConfig, VALUES, changes)


def test_the_name_of_a_stage_is_text() -> None:
    with pytest.raises(ValueError, match="1: the name of a stage or a source is expected"):
        overrides.laid_over(recipes.demo().stages(), {1: {}})  # type: ignore[dict-item]


def test_a_stage_sees_what_the_whole_run_sees() -> None:
    """One definition: what is laid over all configs at once is what each stage makes for itself."""
    changes = {"distill": {"max_steps": 3.0}, "calibrate": {"check_traces": 2.0}}
    together = overrides.laid_over(recipes.demo().stages(), changes)
    for stage, config in recipes.demo().stages().items():
        assert overrides.own_part(stage, type(config), vars(config), changes) == together[stage]
