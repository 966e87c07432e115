"""The teacher's next-token distribution cut down to what is worth storing: k log-probabilities and the others' mass.

The log-probabilities are those of the full softmax, so the stored buckets (k tokens and one tail) are a distribution: a
divergence over them is never larger than the one over the whole vocabulary and equals it for k = V.

Shapes: N tokens (of any rows and steps), V vocabulary of the tokenizer, K kept entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK_TOKENS = 64
"""Rows handled at once: bounds the fp32 copies of [chunk, V] whatever N is."""


@dataclass(frozen=True, kw_only=True)
class SparseTeacher:
    """Falling probabilities; tail_logmass_N is -inf where nothing is left outside the top K."""

    token_ids_NK: Tensor
    logprobs_NK: Tensor
    tail_logmass_N: Tensor
    entropy_nats_N: Tensor
    """Of the whole distribution, not of the stored part."""


def sparse_topk(logits_NV: Tensor, k: int, *, vocab_size: int, chunk_tokens: int = CHUNK_TOKENS) -> SparseTeacher:
    """The distribution softmax(logits) at temperature 1, in fp32 log-space whatever the dtype of the logits.

    Columns from `vocab_size` on are padding of the embedding and count as -inf. ValueError unless 1 <= k <= vocab_size.
    """
    if not 1 <= k <= vocab_size <= logits_NV.shape[-1]:
        raise ValueError(
            f"top_k {k}: must be between 1 and the vocabulary's {vocab_size} tokens (logits for {logits_NV.shape[-1]})"
        )
    chunks = [_sparse_chunk(chunk_NV[:, :vocab_size].float(), k) for chunk_NV in logits_NV.split(chunk_tokens)]
    ids, logprobs, tails, entropies = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return SparseTeacher(token_ids_NK=ids, logprobs_NK=logprobs, tail_logmass_N=tails, entropy_nats_N=entropies)


def _sparse_chunk(logits_NV: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logprobs_NV = logits_NV.log_softmax(-1)
    logprobs_NK, ids_NK = logprobs_NV.topk(k)
    entropy_N = torch.special.entr(logprobs_NV.exp()).sum(-1)
    # summed over what is left instead of 1 - sum(kept): a tail of 1e-12 survives in log-space
    tail_N = logprobs_NV.scatter(1, ids_NK, -torch.inf).logsumexp(-1)
    return ids_NK.int(), logprobs_NK, tail_N, entropy_N
