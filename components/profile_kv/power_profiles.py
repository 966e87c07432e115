"""What a field of use asks of the power distribution: rows of data that override the chosen coefficients.

A token class is read off the token's text: an indentation is white space that begins a line, syntax is punctuation or
a keyword of Python. A piece of a character is neither. An anchor lies in a span that the prompt's author marked, e.g.
from symptom to diagnosis.
"""

from __future__ import annotations

import keyword
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

TOKEN_CLASSES = ("other", "anchor", "indentation", "syntax")


@dataclass(frozen=True, kw_only=True)
class PowerProfile:
    least_alpha: Mapping[str, float] = field(default_factory=dict)
    """Token class -> what alpha is raised to there; beta and gamma share the rest as before."""
    apart: tuple[str, ...] = ()
    """Token classes whose features are scaled among themselves."""
    target_entropy_nats: float = 1.2
    """Of P within a window, for the loss that trains on it; larger spreads the power more evenly."""


PROFILES = {
    "general": PowerProfile(),
    "medical": PowerProfile(least_alpha={"anchor": 0.7}),
    "code": PowerProfile(apart=("indentation", "syntax")),
    "edge": PowerProfile(target_entropy_nats=1.5),  # no token may be a thermal peak
}


def token_classes(texts: Sequence[str], anchors: Sequence[Sequence[int]]) -> list[int]:
    """Index into TOKEN_CLASSES of every token of a sequence, given their texts and the anchored spans [first, end)."""
    anchored = {index for first, end in anchors for index in range(first, end)}
    classes = []
    line_begins = True
    for index, text in enumerate(texts):
        bare = text.strip()
        if index in anchored:
            name = "anchor"
        elif not bare and (line_begins or "\n" in text):
            name = "indentation"
        elif bare and (keyword.iskeyword(bare) or not any(letter.isalnum() or letter == "\ufffd" for letter in bare)):
            name = "syntax"
        else:
            name = "other"
        classes.append(TOKEN_CLASSES.index(name))
        line_begins = text.endswith("\n") or (line_begins and not bare)
    return classes


def token_coefficients(coefficients: Sequence[float], class_BT: Tensor, profile: PowerProfile) -> Tensor:
    """[B, T, 3] alpha, beta, gamma of every token."""
    chosen = torch.tensor(coefficients, dtype=torch.float64)
    of_class = torch.stack([_raised(chosen, profile.least_alpha.get(name, 0.0)) for name in TOKEN_CLASSES])
    return of_class[class_BT]


def token_groups(class_BT: Tensor, profile: PowerProfile) -> Tensor:
    """[B, T] 0, or the class of a token that is scaled apart."""
    apart = [index if name in profile.apart else 0 for index, name in enumerate(TOKEN_CLASSES)]
    return torch.tensor(apart)[class_BT]


def _raised(coefficients: Tensor, alpha: float) -> Tensor:
    if coefficients[0] >= alpha:
        return coefficients
    rest = coefficients[1:].sum()  # positive, or alpha would be 1
    return torch.cat([torch.tensor([alpha]).double(), coefficients[1:] * (1 - alpha) / rest])
