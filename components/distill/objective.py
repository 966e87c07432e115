"""The loss of one micro-batch: student against teacher at every scored token, the teacher live on rollouts and stored
on traces.

The sum is returned, not a mean: the trainer divides by the scored tokens of the whole optimizer step (objectives.md,
rule 1). Shapes: B sequences, T tokens, N scored tokens, C of a chunk, D hidden, V vocabulary of the tokenizer, K kept
tokens, U distinct drawn ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import pad

from reflux.components.algorithms.chunked_loss import TokenLoss, chunked_loss
from reflux.components.algorithms.losses import (
    OBJECTIVES,
    bucketed,
    forward_kl,
    log_probabilities,
    reverse_kl,
    sampled_forward_kl,
)
from reflux.components.algorithms.output_head import final_hidden_states, output_head
from reflux.components.sequences import padded

from .examples import Sequence
from .stored import SampledTeacher, SparseTeacher

OBSERVED_TOKENS = 64
"""Scored tokens of each micro-batch on which the metrics are taken: each costs as much as the loss itself."""
TOP = 16
"""Size of the two top sets whose overlap and mass are reported (arXiv 2604.13016)."""


@dataclass
class Observed:
    """Sums of the metrics of rule 12 over the observed tokens of one optimizer step."""

    tokens: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, student_NV: torch.Tensor, teacher_NV: torch.Tensor) -> None:
        student_top_NK, teacher_top_NK = student_NV.topk(TOP).indices, teacher_NV.topk(TOP).indices
        shared_NKK = student_top_NK[:, :, None] == teacher_top_NK[:, None, :]
        values = {
            "kl_forward_nats": forward_kl(student_NV, teacher_NV),
            "kl_reverse_nats": reverse_kl(student_NV, teacher_NV),
            "student_entropy_nats": torch.special.entr(student_NV.exp()).sum(-1),
            "teacher_entropy_nats": torch.special.entr(teacher_NV.exp()).sum(-1),
            "top_overlap": shared_NKK.any(-1).float().mean(-1),
            "student_mass_on_teacher_top": student_NV.gather(-1, teacher_top_NK).exp().sum(-1),
            "teacher_mass_on_student_top": teacher_NV.gather(-1, student_top_NK).exp().sum(-1),
        }
        self.tokens += len(student_NV)
        for name, value_N in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value_N.sum().item()

    def means(self) -> dict[str, float]:
        return {name: total / self.tokens for name, total in self.sums.items()} if self.tokens else {}


class DistillationLoss:
    """Compares a student with a frozen teacher; both keep their own output head and the logit transforms behind it."""

    def __init__(
        self,
        student: Any,
        teacher: Any,
        tokenizer: Any,
        objective: str,
        beta: float,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        """`compute_dtype` is that of the passes through the layers; logits and losses are float32 whatever it is."""
        self.student, self.teacher, self.compute_dtype = student, teacher, compute_dtype
        self.student_head, self.teacher_head = output_head(student), output_head(teacher)
        self.objective, self.beta = OBJECTIVES[objective], beta
        self.vocab_size, self.pad = len(tokenizer), tokenizer.pad_token_id or 0

    def __call__(self, sequences: Iterable[Sequence], observed: Observed | None = None) -> torch.Tensor:
        """Sum over the scored tokens, nats; differentiable in the student."""
        rollouts = [s for s in sequences if s.teacher is None]
        traces = [s for s in sequences if s.teacher is not None]
        hidden_BTD = self._hidden(self.student, [*rollouts, *traces])
        loss = hidden_BTD.new_zeros(())
        if rollouts:
            loss = loss + self._against_live_teacher(hidden_BTD[: len(rollouts)], rollouts, observed)
        if traces:
            loss = loss + self._against_stored_teacher(hidden_BTD[len(rollouts) :], traces)
        return loss

    def _against_live_teacher(
        self, hidden_BTD: torch.Tensor, rollouts: list[Sequence], observed: Observed | None
    ) -> torch.Tensor:
        with torch.no_grad():
            teacher_ND = _scored(self._hidden(self.teacher, rollouts), rollouts)

        def token_loss(logits_CP: torch.Tensor, rows: slice) -> torch.Tensor:
            student_CV = log_probabilities(logits_CP, self.vocab_size)
            with torch.no_grad():
                teacher_CV = log_probabilities(self.teacher_head(teacher_ND[rows]), self.vocab_size)
                if observed is not None and rows.start == 0:
                    observed.add(student_CV[:OBSERVED_TOKENS], teacher_CV[:OBSERVED_TOKENS])
            return self.objective(student_CV, teacher_CV, self.beta)

        return chunked_loss(_scored(hidden_BTD, rollouts), self.student_head, token_loss)

    def _against_stored_teacher(self, hidden_BTD: torch.Tensor, traces: list[Sequence]) -> torch.Tensor:
        sparse = [s.teacher for s in traces if isinstance(s.teacher, SparseTeacher)]
        sampled = [s.teacher for s in traces if isinstance(s.teacher, SampledTeacher)]
        assert not (sparse and sampled), "traces of one artifact are in one store"
        token_loss = self._over_buckets(sparse) if sparse else self._over_draws(sampled)
        return chunked_loss(_scored(hidden_BTD, traces), self.student_head, token_loss)

    def _over_buckets(self, stored: list[SparseTeacher]) -> TokenLoss:
        token_ids_NK = torch.cat([teacher.token_ids_TK for teacher in stored])
        teacher_NB = torch.cat([teacher.logprobs_TB for teacher in stored])

        def token_loss(logits_CP: torch.Tensor, rows: slice) -> torch.Tensor:
            student_CB = bucketed(log_probabilities(logits_CP, self.vocab_size), token_ids_NK[rows])
            return self.objective(student_CB, teacher_NB[rows], self.beta)

        return token_loss

    def _over_draws(self, stored: list[SampledTeacher]) -> TokenLoss:
        """The forward KL, which is all that draws can serve (`examples.require_usable`)."""
        width = max(teacher.token_ids_TU.shape[1] for teacher in stored)
        token_ids_NU, weights_NU = (
            torch.cat([pad(tensor, (0, width - tensor.shape[1])) for tensor in tensors])
            for tensors in ([t.token_ids_TU for t in stored], [t.weights_TU for t in stored])
        )
        entropy_N = torch.cat([teacher.entropy_nats_T for teacher in stored])

        def token_loss(logits_CP: torch.Tensor, rows: slice) -> torch.Tensor:
            student_CV = log_probabilities(logits_CP, self.vocab_size)
            return sampled_forward_kl(student_CV, token_ids_NU[rows], weights_NU[rows], entropy_N[rows])

        return token_loss

    def _hidden(self, model: Any, sequences: list[Sequence]) -> torch.Tensor:
        inputs = padded([s.token_ids for s in sequences], self.pad)
        narrow = self.compute_dtype != torch.float32
        with torch.autocast(inputs[0].device.type, dtype=self.compute_dtype, enabled=narrow):
            return final_hidden_states(model, *inputs).float()


def _scored(hidden_BTD: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """[N, D] the hidden states from which the scored tokens are predicted, sequence after sequence."""
    parts = [hidden_BTD[b, s.first_scored - 1 : len(s.token_ids) - 1] for b, s in enumerate(sequences)]
    return torch.cat(parts)
