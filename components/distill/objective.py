"""The loss of one micro-batch: student against teacher at every scored token, the teacher live on rollouts and stored
on traces.

What is summed at a token is the recipe's weighted sum of objectives (terms.py). The sum over tokens is returned, not a
mean: the trainer divides by the scored tokens of the whole optimizer step (objectives.md, rule 1). Shapes: N scored
tokens, C of a chunk, D hidden, P rows of the head, V vocabulary of the tokenizer, B = K + 1 buckets, K kept tokens, U
distinct drawn ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from reflux.components.algorithms.chunked_loss import TokenLoss, chunked_loss
from reflux.components.algorithms.losses import (
    DISTRIBUTION_OBJECTIVES,
    MIXTURES,
    log_probabilities,
    sampled_cross_entropy,
    sampled_forward_kl,
)
from reflux.components.algorithms.low_bit import bits_of_sites
from reflux.components.algorithms.range_alignment import range_alignment, range_alignment_of_kept
from reflux.components.algorithms.written_losses import WRITTEN_OBJECTIVES, Written, discounted_later, drawn_from
from reflux.kernels.topk_kl import bucketed

from .config import DistillConfig
from .examples import Sequence
from .fused import bucket_logprobs, summed_divergences
from .layer_comparison import LayerComparison, comparable
from .observed import Observed, against_buckets, against_whole, entropy, observed_rows
from .scorer import scored_token_ids, scorer
from .stored import StoredBuckets, StoredDraws
from .student import scheme_of
from .terms import Term, beside_hard_targets, on_tokens, weight_of


class DistillationLoss:
    """Compares a student with a frozen teacher; both keep their own output head and the logit transforms behind it."""

    def __init__(
        self,
        student: Any,
        teacher: Any,
        tokenizer: Any,
        config: DistillConfig,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        """`compute_dtype` is that of the passes through the layers; logits and losses are float32 whatever it is.

        ValueError if the configuration compares layers and the teacher does not have the student's.
        """
        self.config, self.compute_dtype = config, compute_dtype
        self.comparable = comparable(student, teacher)
        if config.compares_layers and not self.comparable:
            raise ValueError(
                "distill: bridge and warmup_patience compare hidden states, and teacher and student differ in the "
                "number or width of their layers; leave them out, or take a teacher of the student's shape"
            )
        scheme, row_tokens = scheme_of(config), config.max_sequence_tokens if config.packing else 0
        grids = bits_of_sites(student, scheme) if scheme.needs_policy else {}
        self.student, self.teacher = (
            scorer(model, tokenizer, compute_dtype, row_tokens=row_tokens, site_bits=site_bits)
            for model, site_bits in ((student, grids), (teacher, {}))
        )

    def __call__(
        self, sequences: Iterable[Sequence], observed: Observed | None = None, *, teacher_weight: float = 1.0
    ) -> Tensor:
        """Sum over the scored tokens, nats; differentiable in the student. 0 where no token is scored.

        On traces, `teacher_weight` is the teacher's share, and hard targets have the rest.
        """
        rollouts = [s for s in sequences if s.teacher is None]
        traces = [s for s in sequences if s.teacher is not None]
        if observed is not None:
            observed.add(_cut([*rollouts, *traces]))
        trace_terms = beside_hard_targets(self.config.trace_terms, teacher_weight)
        layers = self._compared(rollouts, traces, trace_terms, observed)
        see_student, see_teacher = (None, None) if layers is None else (layers.see_student, layers.see_teacher)
        hidden_ND = self.student.hidden([*rollouts, *traces], see_student, observed)
        split = sum(s.scored for s in rollouts)
        loss = hidden_ND.new_zeros(())
        read = rollouts if layers is None else layers.sequences
        with torch.no_grad():
            teacher_ND = self.teacher.hidden(read, see_teacher) if read else hidden_ND[:0]
        if rollouts:
            loss = loss + self._on_rollouts(hidden_ND[:split], teacher_ND[:split], rollouts, observed)
        if traces:
            loss = loss + self._on_traces(hidden_ND[split:], traces, on_tokens(trace_terms), observed)
        if layers is not None:
            if any(layers.weights):
                loss = loss + layers.loss()
            if observed is not None:
                observed.add(layers.metrics(), layers.seen.step)
        return loss

    def _compared(
        self, rollouts: list[Sequence], traces: list[Sequence], trace_terms: tuple[Term, ...], observed: Observed | None
    ) -> LayerComparison | None:
        """The sequences whose layers are compared; None if there are none. The teacher reads traces only if it must."""
        config = self.config
        on_rollouts, on_traces = weight_of("bridge", config.rollout_terms), weight_of("bridge", trace_terms)
        reads_traces = on_traces > 0 or (config.warmup_patience > 0 and config.on_policy_fraction == 0)
        weights = [on_rollouts] * len(rollouts) + [on_traces] * (len(traces) if reads_traces else 0)
        layers = LayerComparison(
            sequences=[*rollouts, *traces][: len(weights)], weights=weights, fraction=config.bridge_fraction
        )
        wanted = self.comparable and (observed is not None or any(weights))
        return layers if wanted and layers.tokens else None

    def _on_rollouts(
        self, hidden_ND: Tensor, teacher_ND: Tensor, rollouts: list[Sequence], observed: Observed | None
    ) -> Tensor:
        terms = on_tokens(self.config.rollout_terms)
        if not terms:
            if observed is not None and len(hidden_ND):
                self._observe_rollouts(hidden_ND.detach(), teacher_ND, observed)
            return hidden_ND.new_zeros(())
        mixtures = [(t.weight, MIXTURES[t.name](self.config.parameter(t))) for t in terms if t.name in MIXTURES]
        if len(mixtures) == len(terms):
            fused = summed_divergences(self.student, self.teacher, hidden_ND, teacher_ND, mixtures)
            if fused is not None:
                if observed is not None and len(hidden_ND):
                    self._observe_rollouts(hidden_ND.detach(), teacher_ND, observed)
                return fused
        written = self._written(hidden_ND.detach(), teacher_ND, rollouts)

        def token_loss(logits_CP: Tensor, rows: slice) -> Tensor:
            student_CV = log_probabilities(logits_CP, self.student.vocab_size)
            with torch.no_grad():
                teacher_CV = self.teacher.log_probabilities(teacher_ND[rows])
                if observed is not None:
                    seen = observed_rows(rows, len(hidden_ND))
                    observed.add(against_whole(student_CV[seen], teacher_CV[seen]), seen.step)
            return self._sum(terms, student_CV, teacher_CV, lambda: written(student_CV, teacher_CV, rows))

        return chunked_loss(hidden_ND, self.student.head, token_loss)

    @torch.no_grad()
    def _observe_rollouts(self, hidden_ND: Tensor, teacher_ND: Tensor, observed: Observed) -> None:
        seen = observed_rows(slice(0, len(hidden_ND)), len(hidden_ND))
        whole = self.student.log_probabilities(hidden_ND[seen]), self.teacher.log_probabilities(teacher_ND[seen])
        observed.add(against_whole(*whole), seen.step)

    def _on_traces(
        self, hidden_ND: Tensor, traces: list[Sequence], terms: tuple[Term, ...], observed: Observed | None
    ) -> Tensor:
        if not terms:
            return hidden_ND.new_zeros(())
        sparse = [s.teacher for s in traces if isinstance(s.teacher, StoredBuckets)]
        sampled = [s.teacher for s in traces if isinstance(s.teacher, StoredDraws)]
        assert not (sparse and sampled), "traces of one artifact are in one store"
        token_ids_N = scored_token_ids(traces).to(hidden_ND.device)
        if sparse:
            return self._over_buckets(hidden_ND, sparse, token_ids_N, terms, observed)
        return chunked_loss(hidden_ND, self.student.head, self._over_draws(sampled, token_ids_N, terms, observed))

    def _over_buckets(
        self,
        hidden_ND: Tensor,
        stored: list[StoredBuckets],
        token_ids_N: Tensor,
        terms: tuple[Term, ...],
        observed: Observed | None,
    ) -> Tensor:
        kept_NK = torch.cat([teacher.token_ids_TK for teacher in stored]).to(token_ids_N.device)
        teacher_NB = torch.cat([teacher.logprobs_TB for teacher in stored]).to(token_ids_N.device)
        aligned = weight_of("range_alignment", terms) > 0  # asks for the student's largest logit, kept or not
        student_NB = None if aligned else bucket_logprobs(self.student, hidden_ND, kept_NK)
        if student_NB is not None:
            if observed is not None and len(kept_NK):
                seen = observed_rows(slice(0, len(kept_NK)), len(kept_NK))
                with torch.no_grad():
                    student_nV = self.student.log_probabilities(hidden_ND[seen])
                watched = against_buckets(student_nV, student_NB[seen], teacher_NB[seen], kept_NK[seen])
                observed.add(watched, seen.step)
            return self._sum(terms, student_NB, teacher_NB, lambda: self._fused_written(hidden_ND, token_ids_N)).sum()

        def token_loss(logits_CP: Tensor, rows: slice) -> Tensor:
            student_CV = log_probabilities(logits_CP, self.student.vocab_size)
            student_CB = bucketed(student_CV, kept_NK[rows])
            if observed is not None:
                seen = observed_rows(rows, len(kept_NK))
                parts = (student_CV, student_CB, teacher_NB[rows], kept_NK[rows])
                observed.add(against_buckets(*(part[seen] for part in parts)), seen.step)
            written = Written(student_N=_at(student_CV, token_ids_N[rows]))
            return self._sum(terms, student_CB, teacher_NB[rows], lambda: written, student_CV.amax(-1))

        return chunked_loss(hidden_ND, self.student.head, token_loss)

    def _fused_written(self, hidden_ND: Tensor, token_ids_N: Tensor) -> Written:
        own_NB = bucket_logprobs(self.student, hidden_ND, token_ids_N[:, None])
        assert own_NB is not None, "the buckets of the same hidden states were fused"
        return Written(student_N=own_NB[:, 0])

    def _over_draws(
        self, stored: list[StoredDraws], token_ids_N: Tensor, terms: tuple[Term, ...], observed: Observed | None
    ) -> TokenLoss:
        """What is linear in the teacher's probabilities, which is all that draws can serve
        (`examples.require_usable`).
        """
        width = max(teacher.token_ids_TU.shape[1] for teacher in stored)
        drawn_NU, share_NU = (
            torch.cat([pad(tensor, (0, width - tensor.shape[1])) for tensor in tensors]).to(token_ids_N.device)
            for tensors in ([t.token_ids_TU for t in stored], [t.weights_TU for t in stored])
        )
        entropy_N = torch.cat([teacher.entropy_nats_T for teacher in stored]).to(token_ids_N.device)

        def token_loss(logits_CP: Tensor, rows: slice) -> Tensor:
            student_CV = log_probabilities(logits_CP, self.student.vocab_size)
            draws = (drawn_NU[rows], share_NU[rows])
            forward_C = sampled_forward_kl(student_CV, *draws, entropy_N[rows])
            if observed is not None:
                seen = observed_rows(rows, len(token_ids_N))
                observed.add(
                    {
                        "trace_kl_forward_nats": forward_C[seen],
                        "trace_student_entropy_nats": entropy(student_CV[seen]),
                        "trace_teacher_entropy_nats": entropy_N[rows][seen],
                    },
                    seen.step,
                )
            of_name = {
                "cross_entropy": lambda: sampled_cross_entropy(student_CV, *draws),
                "next_token": lambda: -_at(student_CV, token_ids_N[rows]),
            }
            return reduce(add, (t.weight * (of_name[t.name]() if t.name in of_name else forward_C) for t in terms))

        return token_loss

    def _sum(
        self,
        terms: tuple[Term, ...],
        student_CB: Tensor,
        teacher_CB: Tensor,
        written: Callable[[], Written],
        student_largest_C: Tensor | None = None,
    ) -> Tensor:
        """[C] the terms' weighted sum. With buckets comes the student's largest log-probability over all of V."""

        def aligned() -> Tensor:
            width = self.config.alignment_width
            if student_largest_C is None:
                return range_alignment(student_CB, teacher_CB, width)
            return range_alignment_of_kept(student_CB, teacher_CB, width, student_largest_C)

        values = [
            WRITTEN_OBJECTIVES[term.name](written())
            if term.name in WRITTEN_OBJECTIVES
            else aligned()
            if term.name == "range_alignment"
            else DISTRIBUTION_OBJECTIVES[term.name](student_CB, teacher_CB, self.config.parameter(term))
            for term in terms
        ]
        return reduce(add, (term.weight * value_C for term, value_C in zip(terms, values, strict=True)))

    def _written(
        self, student_ND: Tensor, teacher_ND: Tensor, rollouts: list[Sequence]
    ) -> Callable[[Tensor, Tensor, slice], Written]:
        """What is known of the rollouts' tokens beside the two distributions of a chunk."""
        config, device = self.config, student_ND.device
        token_ids_N = scored_token_ids(rollouts).to(device)
        weight_N = torch.tensor([s.weight for s in rollouts for _ in range(s.scored)], device=device)
        drawn_N = later_N = None
        temperature, top_p = 1.0, 1.0
        advantage_N = torch.tensor([s.advantage for s in rollouts for _ in range(s.scored)], device=device)
        if config.needs_draws:
            temperature, top_p = config.rollout_temperature, config.rollout_top_p
            drawn_N = torch.tensor([nats for s in rollouts for nats in s.drawn_nats or ()], device=device)
            assert len(drawn_N) == len(token_ids_N), "rollouts come with what they were drawn with"
            if config.discount and config.minimises("sampled_reverse_kl"):
                now_N = self.student.written_nats(student_ND, token_ids_N, temperature=temperature, top_p=top_p)
                reward_N = self.teacher.written_nats(teacher_ND, token_ids_N) - now_N
                reward_N = reward_N.masked_fill(now_N == -torch.inf, 0.0)
                later_N = discounted_later(reward_N, [s.scored for s in rollouts], config.discount)

        def of_chunk(student_CV: Tensor, teacher_CV: Tensor, rows: slice) -> Written:
            return Written(
                student_N=_at(drawn_from(student_CV, temperature, top_p), token_ids_N[rows]),
                teacher_N=_at(teacher_CV, token_ids_N[rows]),
                drawn_N=None if drawn_N is None else drawn_N[rows],
                later_N=None if later_N is None else later_N[rows],
                weight_N=weight_N[rows],
                advantage_N=advantage_N[rows],
            )

        return of_chunk


def _at(logprobs_CV: Tensor, token_ids_C: Tensor) -> Tensor:
    return logprobs_CV.gather(-1, token_ids_C[:, None])[:, 0]


def _cut(sequences: list[Sequence]) -> dict[str, Tensor]:
    """Shares of the sequences that were cut, and of those of which no token is left to score."""
    return {
        "truncation_rate": torch.tensor([float(s.cut_tokens > 0) for s in sequences]),
        "unscored_rate": torch.tensor([float(s.scored == 0) for s in sequences]),
    }
