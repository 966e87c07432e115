"""Arguments of a pipeline reach KFP in the types of its inputs, or are refused by name."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from reflux.pipelines import recipes
from reflux.pipelines.kubeflow import arguments

INPUTS: dict[str, dict[str, Any]] = {
    "store": {"parameterType": "STRING"},
    "steps": {"parameterType": "NUMBER_INTEGER", "defaultValue": 1.0},
    "rate": {"parameterType": "NUMBER_DOUBLE", "defaultValue": 0.5},
    "dry": {"parameterType": "BOOLEAN", "defaultValue": False},
    "layers": {"parameterType": "LIST", "isOptional": True},
    "overrides": {"parameterType": "STRUCT", "defaultValue": {}},
    "objective": {"parameterType": "STRING", "defaultValue": "jsd", "literals": ["jsd", "reverse_kl"]},
}


def test_text_becomes_the_type_of_its_input() -> None:
    texts = [
        "store=s3://b/p?x=1", "steps=3", "rate=2", "dry=True", "layers=[1, 2]", "objective=reverse_kl",
        'overrides={"distill": {"max_steps": 2}}',
    ]  # fmt: skip
    values = arguments.check(INPUTS, arguments.parse(INPUTS, texts))
    assert values == {
        "store": "s3://b/p?x=1", "steps": 3, "rate": 2, "dry": True, "layers": [1, 2], "objective": "reverse_kl",
        "overrides": {"distill": {"max_steps": 2}},
    }  # fmt: skip
    assert {name: type(value) for name, value in values.items() if name in ("steps", "dry")} == {
        "steps": int,
        "dry": bool,
    }


def test_a_text_input_stays_text_whatever_it_looks_like() -> None:
    assert arguments.parse(INPUTS, ["store=true"]) == {"store": "true"}
    assert arguments.parse(INPUTS, ["store="]) == {"store": ""}


@pytest.mark.parametrize("value", [3, 3.0])
def test_a_whole_number_may_be_written_as_a_float(value: Any) -> None:
    assert repr(arguments.check(INPUTS, {"store": "s", "steps": value})["steps"]) == "3"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stroe": "s"}, "argument stroe: no such input; did you mean store?"),
        ({"store": 3}, "argument store: 3 is not text"),
        ({"store": "s", "steps": 2.5}, "argument steps: 2.5 is not a whole number"),
        ({"store": "s", "steps": True}, "argument steps: True is not a whole number"),
        ({"store": "s", "steps": 2**60}, f"argument steps: {2**60} is not a whole number"),
        ({"store": "s", "rate": float("nan")}, "argument rate: nan is not a number"),
        ({"store": "s", "layers": [1, float("inf")]}, "argument layers: [1, inf] is not a list"),
        ({"store": "s", "overrides": {"a": date(2026, 1, 1)}}, "argument overrides: {'a': datetime.date(2026"),
        ({"store": "s", "dry": 1}, "argument dry: 1 is not true or false"),
        ({"store": "s", "layers": {"a": 1}}, "argument layers: {'a': 1} is not a list"),
        ({"store": "s", "objective": "kl"}, "argument objective: 'kl' is not one of jsd, reverse_kl"),
        ({"steps": 1}, "no value for store"),
        ({"store": "s" * 98_310}, "arguments of 98,312 bytes, of which store 98,312: all together stay below 98,304"),
    ],
)
def test_what_the_server_would_refuse_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"no value|argument") as caught:
        arguments.check(INPUTS, given)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text", ["steps", "steps=many", "dry=yes", "layers=1,2", "overrides={", f"layers={'[' * 9999}"]
)
def test_text_that_is_no_value_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"--arg 'steps'|argument"):
        arguments.check(INPUTS, arguments.parse(INPUTS, ["store=s", text]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distill": {"max_stepz": 2}}, "argument overrides: distill.max_stepz: no such field; did you mean max_steps"),
        ({"distill": {"max_steps": 2.5}}, "argument overrides: distill.max_steps: 2.5 is not a whole number"),
        ({"teacher": "ORG/NAME"}, "argument overrides: overrides.teacher: is a parameter of the run itself"),
    ],
)
def test_overrides_are_checked_as_every_stage_will(changes: dict[str, Any], message: str) -> None:
    arguments.check_overrides(recipes.demo(), {"overrides": {"distill": {"max_steps": 2.0}}})
    arguments.check_overrides(recipes.demo(), {})
    with pytest.raises(ValueError, match=r"argument overrides") as caught:
        arguments.check_overrides(recipes.demo(), {"overrides": changes})
    assert message in str(caught.value)


def test_accelerators_are_checked_before_a_pod_asks_for_them() -> None:
    arguments.check_overrides(recipes.demo(), {"accelerator": "amd.com/gpu", "accelerators": "2"})
    for values in ({"accelerator": "A100"}, {"accelerator": "nvidia.com/gpu", "accelerators": "1.0"}):
        with pytest.raises(ValueError, match=f"accelerators? {list(values.values())[-1]!r}: "):
            arguments.check_overrides(recipes.demo(), values)
