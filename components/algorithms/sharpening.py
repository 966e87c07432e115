"""Answers weighed towards the sharpened teacher, pi_alpha(y|x) ∝ p_T(y|x)^alpha over whole sequences, without search.

Sequential Monte Carlo: the student proposes N answers to a prompt side by side, in blocks of tokens; the teacher scores
each block, and an answer's weight grows by p_T(block)^alpha / q(block). Where few answers hold most of the weight they
are drawn again in proportion to it, and the copies start from equal weights: those they stand for were spent on the
drawing. What an answer ends with is its weight in training. The mean weight estimates Z = Σ_y p_T(y|x)^alpha without
bias, whenever it is that answers are drawn again.

Sources: arXiv 2610.06804 (the objective), 2602.10273 (blocks and resampling). Not to be confused with power.py, which
is about where a sequence spends its computation. Shapes: G prompts, N particles of each, R rows of the G * N particles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RESAMPLE_BELOW = 0.5
"""Share of N that the effective number of particles may fall to."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """What R rows were extended by; log-probabilities are of the new tokens together, in nats, float64."""

    token_ids: list[list[int]]
    ended: list[bool]
    """Whether the row's answer is complete."""
    proposal_nats_R: Tensor
    """Under the very distribution that the tokens were drawn from."""
    teacher_nats_R: Tensor
    """At temperature 1."""
    student_nats_R: Tensor
    """At temperature 1; for the absorbed exponent alone."""


Extend = Callable[[list[list[int]], list[int]], Block]
"""(answers of all G * N particles so far, the rows that are not complete) -> the next block of each of those rows."""


@dataclass(frozen=True, kw_only=True)
class Particles:
    answers: list[list[int]]
    """G * N, the N of a prompt side by side."""
    ended: list[bool]
    weights_GN: Tensor
    """Sum to 1 over the particles of a prompt."""
    log_normalizer_G: Tensor
    """Estimate of log Z; unbiased in Z, not in its logarithm."""
    teacher_nats_GN: Tensor
    """Of each answer as it was proposed, up to the first time that its prompt's were drawn again: copies would hide
    what the student does by itself.
    """
    student_nats_GN: Tensor
    """Of the same tokens."""
    effective_G: Tensor
    """Effective number of particles where it was least, 1 to N."""
    resampled: int
    """How often particles were drawn again, over all prompts."""


def power_particles(extend: Extend, seeds: Sequence[int], *, particles: int, alpha: float, blocks: int) -> Particles:
    """Answers to G prompts, one seed for each, in at most `blocks` blocks; an answer cut there counts as it stands.

    Proposals may come from any distribution that gives mass wherever the teacher does. Temperature 1 / alpha fits a
    student that is still the teacher; one that has become pi_alpha proposes at it too narrowly for few particles, and
    without an anchor sharpens itself beyond alpha. ValueError for a number that makes no weights.
    """
    if particles < 1 or blocks < 1 or not 0 < alpha < math.inf:
        raise ValueError(f"particles {particles}, blocks {blocks}, alpha {alpha}: all must be positive")
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    shape = (len(seeds), particles)
    log_weight_GN, teacher_GN, student_GN = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
    log_normalizer_G = torch.zeros(len(seeds), dtype=torch.float64)
    answers: list[list[int]] = [[] for _ in range(len(seeds) * particles)]
    ended = [False] * len(answers)
    resampled, as_proposed_G = 0, torch.ones(len(seeds), dtype=torch.bool)
    effective_G = torch.full((len(seeds),), float(particles), dtype=torch.float64)
    for number in range(blocks):
        rows = [row for row, is_ended in enumerate(ended) if not is_ended]
        if not rows:
            break
        block = extend(answers, rows)
        for row, token_ids, is_ended in zip(rows, block.token_ids, block.ended, strict=True):
            answers[row], ended[row] = answers[row] + token_ids, is_ended
        log_weight_GN.view(-1)[rows] += alpha * block.teacher_nats_R - block.proposal_nats_R
        as_proposed_R = as_proposed_G.repeat_interleave(particles)[rows]
        teacher_GN.view(-1)[rows] += block.teacher_nats_R * as_proposed_R
        student_GN.view(-1)[rows] += block.student_nats_R * as_proposed_R
        effective_G = torch.minimum(effective_G, effective_number(log_weight_GN))
        if number == blocks - 1:
            break
        few_G = effective_number(log_weight_GN) < RESAMPLE_BELOW * particles
        for g in few_G.nonzero()[:, 0].tolist():
            own = range(g * particles, (g + 1) * particles)
            if all(ended[row] for row in own):
                continue
            chosen = systematic(log_weight_GN[g].softmax(-1), torch.rand(1, generator=generators[g]).item())
            log_normalizer_G[g] += mean_weight(log_weight_GN[g])
            log_weight_GN[g], as_proposed_G[g] = 0.0, False
            answers[own.start : own.stop] = [answers[own[i]] for i in chosen]
            ended[own.start : own.stop] = [ended[own[i]] for i in chosen]
            resampled += 1
    return Particles(
        answers=answers,
        ended=ended,
        weights_GN=log_weight_GN.softmax(-1),
        log_normalizer_G=log_normalizer_G + mean_weight(log_weight_GN),
        teacher_nats_GN=teacher_GN,
        student_nats_GN=student_GN,
        effective_G=effective_G,
        resampled=resampled,
    )


def effective_number(log_weight_GN: Tensor) -> Tensor:
    """[G] (Σ w)² / Σ w²: as many equal weights would vary as little."""
    return (2 * log_weight_GN.logsumexp(-1) - (2 * log_weight_GN).logsumexp(-1)).exp()


def mean_weight(log_weight_GN: Tensor) -> Tensor:
    """[G] log of the mean weight."""
    return log_weight_GN.logsumexp(-1) - math.log(log_weight_GN.shape[-1])


def systematic(weights_N: Tensor, offset: float) -> list[int]:
    """N indices, ascending, each drawn N * weight times up to less than one: one offset in [0, 1) serves all draws."""
    count = len(weights_N)
    places_N = (torch.arange(count, dtype=torch.float64) + offset) / count
    until_N = weights_N.double().cumsum(-1)
    return torch.searchsorted(until_N, places_N * until_N[-1], right=True).clamp(max=count - 1).tolist()


def absorbed_exponent(student_nats_GN: Tensor, teacher_nats_GN: Tensor, weights_GN: Tensor) -> float:
    """alpha_eff: the exponent a that fits log q(y|x) = a * log p_T(y|x) − log Z(x) best over the answers to each prompt
    (weighted least squares). 1 where student and teacher are the same, alpha where the student has become pi_alpha.

    Weights sum to 1 over a prompt's answers. NaN where all answers to each prompt are equally likely to the teacher.
    """

    def centred(nats_GN: Tensor) -> Tensor:
        return nats_GN - (weights_GN * nats_GN).sum(-1, keepdim=True)

    student_GN, teacher_GN = centred(student_nats_GN), centred(teacher_nats_GN)
    return ((weights_GN * student_GN * teacher_GN).sum() / (weights_GN * teacher_GN.square()).sum()).item()
