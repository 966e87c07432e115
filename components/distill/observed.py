"""What is watched while the loss is computed (objectives.md, rule 12): the two distributions of each step side by side.

Taken from log-probabilities that the loss has just made, on a sample of its tokens. Shapes: N observed tokens, V
vocabulary of the tokenizer, B = K + 1 buckets of a stored distribution, K kept tokens, M the size of a top set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reflux.components.algorithms.layer_errors import activation_kl, squared_errors
from reflux.components.algorithms.losses import forward_kl, reverse_kl

OBSERVED_TOKENS = 64
"""Scored tokens of each micro-batch and kind of sequence looked at; 64 of 416 add 1 to 4 % to head and loss."""
TOP = 16
"""Size of the two top sets whose overlap and mass are reported (arXiv 2604.13016)."""


@dataclass
class Observed:
    """Means over the observed tokens or sequences of one optimizer step, by name."""

    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, values: Mapping[str, Tensor], stands_for: int = 1) -> None:
        """One-dimensional tensors; each name is averaged over all its entries, of which each stands for so many tokens:
        of a long micro-batch fewer are looked at, and it counts no less for that.
        """
        totals = torch.stack([value_N.detach().double().sum() for value_N in values.values()]).tolist()
        for (name, value_N), total in zip(values.items(), totals, strict=True):
            self.sums[name] = self.sums.get(name, 0.0) + stands_for * total
            self.counts[name] = self.counts.get(name, 0) + stands_for * len(value_N)

    @classmethod
    def together(cls, parts: Iterable[Observed]) -> Observed:
        """What several processes have seen."""
        whole = cls()
        for part in parts:
            for name, total in part.sums.items():
                whole.sums[name] = whole.sums.get(name, 0.0) + total
                whole.counts[name] = whole.counts.get(name, 0) + part.counts[name]
        return whole

    def means(self) -> dict[str, float]:
        return {name: total / self.counts[name] for name, total in self.sums.items() if self.counts[name]}


def observed_rows(rows: slice, tokens: int) -> slice:
    """Which of a chunk's rows are looked at, so that about OBSERVED_TOKENS of all `tokens` are, evenly spread; one of
    them stands for as many tokens as the slice's step.
    """
    every = -(-tokens // OBSERVED_TOKENS)
    return slice(-rows.start % every, None, every)


@torch.no_grad()
def against_whole(student_NV: Tensor, teacher_NV: Tensor) -> dict[str, Tensor]:
    """[N] each, from both log-probabilities over the whole vocabulary."""
    size = min(TOP, student_NV.shape[-1])
    student_top_NM, teacher_top_NM = student_NV.topk(size).indices, teacher_NV.topk(size).indices
    return {
        "kl_forward_nats": forward_kl(student_NV, teacher_NV),
        "kl_reverse_nats": reverse_kl(student_NV, teacher_NV),
        "student_entropy_nats": entropy(student_NV),
        "teacher_entropy_nats": entropy(teacher_NV),
        "top_overlap": _named(student_top_NM, teacher_top_NM).float().mean(-1),
        "student_mass_on_teacher_top": student_NV.gather(-1, teacher_top_NM).exp().sum(-1),
        "teacher_mass_on_student_top": teacher_NV.gather(-1, student_top_NM).exp().sum(-1),
    }


@torch.no_grad()
def against_buckets(
    student_NV: Tensor, student_NB: Tensor, teacher_NB: Tensor, token_ids_NK: Tensor
) -> dict[str, Tensor]:
    """The same against a stored top k. What is in the tail is not known apart, so the divergences, the teacher's
    entropy and its mass on the student's top set are lower bounds.
    """
    size = min(TOP, token_ids_NK.shape[-1])
    teacher_top_NM, student_top_NM = token_ids_NK[:, :size], student_NV.topk(size).indices
    stored_mass_NK = teacher_NB[:, :-1].exp()
    return {
        "trace_kl_forward_nats": forward_kl(student_NB, teacher_NB),
        "trace_kl_reverse_nats": reverse_kl(student_NB, teacher_NB),
        "trace_student_entropy_nats": entropy(student_NV),
        "trace_teacher_entropy_nats": entropy(teacher_NB),
        "trace_top_overlap": _named(teacher_top_NM, student_top_NM).float().mean(-1),
        "trace_student_mass_on_teacher_top": student_NV.gather(-1, teacher_top_NM).exp().sum(-1),
        "trace_teacher_mass_on_student_top": (stored_mass_NK * _named(token_ids_NK, student_top_NM)).sum(-1),
    }


@torch.no_grad()
def against_layers(student_LND: Several[Tensor], teacher_LND: Several[Tensor], share_N: Tensor) -> dict[str, Tensor]:
    """How errors grow: |h_S − h_T| / |h_T| after the first and the last decoder layer, and after the last one in the
    first and last quarter of the scored tokens of a sequence, of which `share_N` in [0, 1) lie before; and the KL of
    the layers' normalised outputs.
    """
    first_N, last_N = squared_errors([student_LND[0], student_LND[-1]], [teacher_LND[0], teacher_LND[-1]]).sqrt()
    return {
        "error_first_layer": first_N,
        "error_last_layer": last_N,
        "error_first_quarter": last_N[share_N < 0.25],
        "error_last_quarter": last_N[share_N >= 0.75],
        "activation_kl_nats": activation_kl(student_LND, teacher_LND),
    }


def entropy(logprobs_NV: Tensor) -> Tensor:
    """[N] nats. A third of the time of `torch.special.entr`."""
    finite_NV = logprobs_NV.clamp(min=torch.finfo(logprobs_NV.dtype).min)  # 0 * -inf is NaN
    return -torch.linalg.vecdot(logprobs_NV.exp(), finite_NV)


def _named(token_ids_NK: Tensor, others_NM: Tensor) -> Tensor:
    """[N, K] whether each of the first is among the second."""
    return (token_ids_NK[:, :, None] == others_NM[:, None, :]).any(-1)
