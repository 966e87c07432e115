"""Student and teacher layer by layer over the sequences of one micro-batch that the teacher reads: the loss `bridge`,
and how far errors have grown with depth and along an answer.

Shapes: N scored tokens of all sequences of the student's forward, M of those that the teacher reads, which come first,
n of these that are watched, L layers, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from reflux.components.algorithms.layer_errors import bridge, squared_errors

from .examples import Sequence
from .observed import against_layers, observed_rows


def comparable(student: Any, teacher: Any) -> bool:
    """Whether the two have as many layers of the same width, so that their hidden states can be compared."""
    names = ("num_hidden_layers", "hidden_size")
    return all(getattr(student.config, name) == getattr(teacher.config, name) for name in names)


@dataclass(kw_only=True)
class LayerComparison:
    """Is shown the layers of both models, then compares them."""

    sequences: Several[Sequence]
    """That the teacher reads."""
    weights: Several[float]
    """Of bridge, for each of them."""
    fraction: float
    student_LMD: list[Tensor] = field(default_factory=list)
    teacher_LMD: list[Tensor] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(s.scored for s in self.sequences)

    def see_student(self, layer_ND: Tensor) -> None:
        layer_MD = layer_ND[: self.tokens]
        self.student_LMD.append(layer_MD if any(self.weights) else layer_MD.detach()[self.seen].clone())

    def see_teacher(self, layer_MD: Tensor) -> None:
        self.teacher_LMD.append(layer_MD if any(self.weights) else layer_MD[self.seen].clone())

    def loss(self) -> Tensor:
        """Sum over tokens of squared relative distances at the worst places, each sequence by its weight."""
        lengths = [s.scored for s in self.sequences]
        error_LM = squared_errors(self.student_LMD, self.teacher_LMD)
        weight_M = torch.tensor([w for w, n in zip(self.weights, lengths, strict=True) for _ in range(n)])
        return (bridge(error_LM, lengths, self.fraction) * weight_M.to(error_LM)).sum()

    @torch.no_grad()
    def metrics(self) -> dict[str, Tensor]:
        """Of the tokens that are `seen`."""
        rows = self.seen if any(self.weights) else slice(None)
        share_M = torch.tensor([t / s.scored for s in self.sequences for t in range(s.scored)])
        student_LnD, teacher_LnD = ([h[rows] for h in layers] for layers in (self.student_LMD, self.teacher_LMD))
        return against_layers(student_LnD, teacher_LnD, share_M[self.seen].to(student_LnD[0].device))

    @property
    def seen(self) -> slice:
        """Rows that are watched, evenly spread."""
        return observed_rows(slice(0, self.tokens), self.tokens)
