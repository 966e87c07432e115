"""How far two next-token distributions are apart, and the policy match rate made of it.

For scoring only: nothing here needs a gradient, and values are in bits so that the Jensen-Shannon divergence lies in
[0, 1] whatever the vocabulary. The differentiable objectives, in nats, are in losses.py.

Shapes: N tokens (n of one chunk), D hidden, V vocabulary of the tokenizer, P >= V rows of the embedding, which models
pad.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .losses import log_probabilities

FLOOR_NATS = -200.0
"""A log-probability down here is 0 in fp32; a finite floor keeps 0 * -inf out of the sums."""

CHUNK = 64
"""Tokens whose logits exist at once: at 49,152 words the chunk still fits the caches of a CPU, 2.4 times faster than
256 at once."""


def jensen_shannon_bits(log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
    """[N] Jensen-Shannon divergence, bits: KL(p‖m) / 2 + KL(q‖m) / 2 with m = (p + q) / 2 (Lin 1991). In [0, 1].

    Arguments are log-probabilities in nats; -inf is a probability of 0. ValueError for differing shapes, or a type
    coarser than fp32: in bf16 the difference of two close models is lost in rounding.
    """
    if log_p_NV.shape != log_q_NV.shape:
        raise ValueError(f"distributions of different shape: {tuple(log_p_NV.shape)} and {tuple(log_q_NV.shape)}")
    if torch.finfo(log_p_NV.dtype).bits < 32 or torch.finfo(log_q_NV.dtype).bits < 32:
        raise ValueError(f"dtypes {log_p_NV.dtype} and {log_q_NV.dtype}: allowed are float32 and float64")
    log_p_NV, log_q_NV = log_p_NV.clamp(min=FLOOR_NATS), log_q_NV.clamp(min=FLOOR_NATS)
    log_m_NV = torch.logaddexp(log_p_NV, log_q_NV).sub_(math.log(2.0))
    kl_p_N = (log_p_NV.exp() * (log_p_NV - log_m_NV)).sum(-1)
    kl_q_N = (log_q_NV.exp() * (log_q_NV - log_m_NV)).sum(-1)
    return (0.5 * (kl_p_N + kl_q_N) / math.log(2.0)).clamp(0.0, 1.0)  # rounding alone can leave the bounds


def policy_match_rate(jsd_bits_sum: float, tokens: int) -> float:
    """1 - mean Jensen-Shannon divergence over `tokens` decisions, in [0, 1]; 1 decides exactly as the teacher does."""
    if tokens < 1:
        raise ValueError(f"tokens {tokens}: a rate needs at least one decision")
    return 1.0 - jsd_bits_sum / tokens


def score_tokens(
    hidden_ND: Tensor,
    targets_N: Tensor,
    head: Callable[[Tensor], Tensor],
    vocab_size: int,
    *,
    teacher: tuple[Tensor, Callable[[Tensor], Tensor]] | None = None,
) -> tuple[Tensor, Tensor]:
    """([N] nats, [N] bits), both fp64: -log p(target) and the divergence from the teacher, never more than CHUNK rows
    of logits at a time.

    `head` maps [n, D] to logits [n, P]. `teacher` is its own final hidden states of the same N tokens, and its own
    head; without it the divergences are 0. ValueError for a target outside the vocabulary.
    """
    if len(targets_N) and not (int(targets_N.min()) >= 0 and int(targets_N.max()) < vocab_size):
        raise ValueError(f"token {int(targets_N.max())} is not in the tokenizer's vocabulary of {vocab_size}")
    nll_N = torch.zeros(len(targets_N), dtype=torch.float64)
    jsd_N = torch.zeros(len(targets_N), dtype=torch.float64)
    for start in range(0, len(targets_N), CHUNK):
        rows = slice(start, start + CHUNK)
        log_q_nV = log_probabilities(head(hidden_ND[rows]), vocab_size)
        nll_N[rows] = -log_q_nV.gather(-1, targets_N[rows, None])[:, 0].double()
        if teacher is not None:
            teacher_ND, teacher_head = teacher
            log_p_nV = log_probabilities(teacher_head(teacher_ND[rows]), vocab_size)
            jsd_N[rows] = jensen_shannon_bits(log_p_nV, log_q_nV).double()
    return nll_N, jsd_N
