"""What distill minimises, as a recipe writes it: "0.9*beta_jsd + 0.1*cross_entropy".

Read and checked without torch, so that a wrong objective is refused where a run is submitted. The functions of these
names are in algorithms/losses.py (whole distributions) and algorithms/written_losses.py (the written tokens alone).
"""

from __future__ import annotations

from dataclasses import dataclass

ROLLOUTS, TRACES = "rollouts", "traces"


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What an objective needs of the sequences that it is used on."""

    parameter: str = ""
    """The configuration's field that is its parameter."""
    only_on: str = ""
    """ROLLOUTS or TRACES, where it makes sense on one of them."""
    draws: bool = False
    """Whether counted draws of the teacher give it unbiased, with its parameter at 0."""


OBJECTIVES = {
    "beta_jsd": Traits(parameter="beta", draws=True),
    "forward_kl": Traits(draws=True),
    "reverse_kl": Traits(),
    "skew_forward_kl": Traits(parameter="skew", draws=True),
    "skew_reverse_kl": Traits(parameter="skew"),
    "cross_entropy": Traits(draws=True),
    "range_alignment": Traits(parameter="alignment_width"),
    "next_token": Traits(only_on=TRACES, draws=True),
    "sampled_reverse_kl": Traits(only_on=ROLLOUTS),
    "sharpening": Traits(only_on=ROLLOUTS),
    "verifier": Traits(only_on=ROLLOUTS),
    "bridge": Traits(draws=True),
}
"""Every objective that a recipe may name. Its function is in DISTRIBUTION_OBJECTIVES or WRITTEN_OBJECTIVES; those of
range_alignment, which sees logits, and of bridge, which sees hidden states, are in range_alignment.py and
layer_errors.py.
"""


@dataclass(frozen=True, kw_only=True)
class Term:
    """One summand: weight times the objective of that name."""

    name: str
    weight: float = 1.0


def parse(field: str, text: str) -> tuple[Term, ...]:
    """The terms of "NAME" or "WEIGHT*NAME + …". ValueError that names the field and what it cannot read."""
    terms = []
    for part in text.split("+"):
        weight, star, name = part.rpartition("*")
        if name.strip() not in OBJECTIVES:
            allowed = ", ".join(OBJECTIVES)
            raise ValueError(f"distill.{field} {text!r}: {name.strip()!r} is no objective; allowed are {allowed}")
        terms.append(Term(name=name.strip(), weight=_weight(field, text, weight) if star else 1.0))
    names = [term.name for term in terms]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"distill.{field} {text!r}: {min(twice)} is there twice")
    return tuple(terms)


def on_tokens(terms: tuple[Term, ...]) -> tuple[Term, ...]:
    """Those on next-token distributions: all but bridge."""
    return tuple(term for term in terms if term.name != "bridge")


def weight_of(name: str, terms: tuple[Term, ...]) -> float:
    """Together; 0 without such a term."""
    return sum(term.weight for term in terms if term.name == name)


def beside_hard_targets(terms: tuple[Term, ...], teacher_weight: float) -> tuple[Term, ...]:
    """`teacher_weight` of the terms, and next_token for the rest."""
    if teacher_weight == 1:
        return terms
    taught = (Term(name=term.name, weight=teacher_weight * term.weight) for term in terms)
    return (*taught, Term(name="next_token", weight=1 - teacher_weight))


def _weight(field: str, text: str, weight: str) -> float:
    try:
        value = float(weight)
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        raise ValueError(f"distill.{field} {text!r}: the weight {weight.strip()!r} must be a positive number")
    return value


def require_place(field: str, terms: tuple[Term, ...], place: str) -> None:
    """ValueError if one of the terms makes no sense on the sequences of this place."""
    for term in terms:
        only_on = OBJECTIVES[term.name].only_on
        if only_on and only_on != place:
            hint = "" if field == "trace_objective" or place == ROLLOUTS else "; name another one in trace_objective"
            raise ValueError(
                f"distill.{field}: {term.name} needs {only_on}, and this is the objective on {place}{hint}"
            )
