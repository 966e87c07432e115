"""One dataclass, three uses: what a field means must be the same in KFP, on the command line and in the key."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from reflux.components import declare


@dataclass(frozen=True, kw_only=True)
class BrewStrongTeaConfig:
    """Brew tea."""

    leaves: str = declare.source()
    """URI of the leaves."""
    tea: str = declare.source("builtin:green")
    minutes: float
    """Minutes in the pot, above 0; 100 % of people want 3."""
    cups: int = 2
    sweet: bool = False
    spices: list[str] = field(default_factory=lambda: ["clove"])
    sizes: list[int] = declare.setting([1, 2])
    rates: list[float] = field(default_factory=list)
    pot: str = declare.setting("steel")
    milk: str = declare.choice("none", ("none", "first", "last"))

    def __post_init__(self) -> None:
        declare.check_choices(self)
        if self.minutes <= 0:
            raise ValueError(f"brew_strong_tea.minutes: {self.minutes} is not above 0")


def test_values_arrive_as_kfp_sends_them() -> None:
    config = declare.from_mapping(BrewStrongTeaConfig, {"minutes": 3, "cups": 10.0, "sizes": [1.0], "rates": [1]})
    assert config == BrewStrongTeaConfig(minutes=3.0, cups=10, sizes=[1], rates=[1.0])
    assert type(config.cups) is int
    assert type(config.minutes) is float
    assert type(config.sizes[0]) is int
    assert type(config.rates[0]) is float


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cupz": 1}, r"brew_strong_tea\.cupz: no such field; did you mean cups\?.*Known: leaves, tea, minutes"),
        ({"cups": 10.5}, r"brew_strong_tea\.cups: 10\.5 is not a whole number"),
        ({"cups": True}, r"cups: True is not a whole number"),
        ({"cups": "3"}, r"cups: '3' is not a whole number"),
        ({"sweet": 1}, r"sweet: 1 is not true or false"),
        ({"minutes": float("nan")}, r"minutes: nan is not a finite number"),
        ({"spices": "clove"}, r"spices: 'clove' is not a list of text values"),
        ({"sizes": [1, 2.5]}, r"sizes: 2\.5 is not a whole number"),
        ({"minutes": -1}, r"minutes: -1\.0 is not above 0"),
        ({"minutes": None}, r"minutes: None is not a finite number"),
        ({"milk": "both"}, r"brew_strong_tea\.milk 'both': allowed are none, first, last"),
    ],
)
def test_bad_values_are_refused_by_name(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        declare.from_mapping(BrewStrongTeaConfig, {"minutes": 1.0} | values)


def test_missing_value_is_named() -> None:
    with pytest.raises(ValueError, match=r"brew_strong_tea: no value for minutes"):
        declare.from_mapping(BrewStrongTeaConfig, {})


def test_roles_split_the_fields() -> None:
    config = BrewStrongTeaConfig(minutes=3)  # an int where a float is declared
    assert declare.key_fields(config) == {
        "minutes": 3.0, "cups": 2, "sweet": False, "spices": ["clove"], "rates": [], "milk": "none",
    }  # fmt: skip
    assert type(declare.key_fields(config)["minutes"]) is float
    assert declare.other_fields(config) == {"sizes": [1, 2], "pot": "steel"}
    assert declare.source_fields(config) == {"tea": "builtin:green"}


def test_command_line_reads_the_same_fields() -> None:
    parser = argparse.ArgumentParser()
    declare.to_argparse(BrewStrongTeaConfig, parser)
    arguments = ["--minutes", "3", "--sweet", "True", "--spices", "a,b", "--sizes", "[3, 4]", "--rates=-1e-5,2"]
    config = declare.from_mapping(BrewStrongTeaConfig, vars(parser.parse_args(arguments)))
    assert config == BrewStrongTeaConfig(minutes=3.0, sweet=True, spices=["a", "b"], sizes=[3, 4], rates=[-1e-5, 2.0])
    text = parser.format_help()
    assert "Minutes in the pot" in text
    assert '["clove"]' in text
    assert "--milk none|first|last" in text


def test_command_line_names_field_and_value(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    declare.to_argparse(BrewStrongTeaConfig, parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--minutes", "3", "--cups", "many"])
    assert "brew_strong_tea.cups: 'many' is not a whole number" in capsys.readouterr().err


def test_component_has_one_parameter_per_field_and_takes_the_executor_input() -> None:
    component = declare.container_component(
        "brew", BrewStrongTeaConfig, inputs=["water"], outputs=["brew"], html={"report": "report.html"}
    )
    spec = component.kfp.component_spec
    assert {name: (i.type, i.default) for name, i in spec.inputs.items()} == {
        "water": ("system.Dataset@0.0.1", None),
        "store": ("String", None),
        "run": ("String", None),
        "job": ("String", ""),
        "overrides": ("Dict", {}),
        "leaves": ("String", ""),
        "tea": ("String", "builtin:green"),
        "minutes": ("Float", None),
        "cups": ("Integer", 2),
        "sweet": ("Boolean", False),
        "spices": ("List[String]", ["clove"]),
        "sizes": ("List[Integer]", [1, 2]),
        "rates": ("List[Float]", []),
        "pot": ("String", "steel"),
        "milk": ("String", "none"),
    }
    assert {name: o.type for name, o in spec.outputs.items()} == {
        "brew": "system.Dataset@0.0.1",
        "metrics": "system.Metrics@0.0.1",
        "summary": "system.Markdown@0.0.1",
        "report": "system.HTML@0.0.1",
    }
    assert spec.inputs["minutes"].description == "Minutes in the pot, above 0; 100 % of people want 3."
    container = spec.implementation.container
    assert container.image == declare.IMAGE
    assert container.command == ["python3", "-m", "reflux.components", "brew"]
    assert [str(argument) for argument in container.args] == ["--executor-input", "{{$}}"]


def test_declaration_refuses_what_kfp_cannot_carry() -> None:
    @dataclass(frozen=True, kw_only=True)
    class OddConfig:
        choice: int | None = None

    with pytest.raises(ValueError, match=r"odd\.choice: type .* is not allowed"):
        declare.container_component("odd", OddConfig, outputs=["tea"])
    with pytest.raises(ValueError, match=r"brew_strong_tea\.pot: the name is taken"):
        declare.container_component("brew", BrewStrongTeaConfig, inputs=["pot"], outputs=["brew"])
    with pytest.raises(ValueError, match=r"exactly one artifact, not \['a', 'b'\]"):
        declare.container_component("brew", BrewStrongTeaConfig, outputs=["a", "b"])


def test_declaring_needs_no_kfp() -> None:
    code = "import sys, reflux.components.declare; sys.exit(bool({'kfp', 'torch', 'pyarrow'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
