"""The stored buckets against the full softmax in float64."""

from __future__ import annotations

import pytest
import torch

from reflux.components.algorithms.sparse_teacher import sparse_topk


def logits(rows: int, columns: int, *, scale: float = 4.0, seed: int = 0) -> torch.Tensor:
    return scale * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("rows", "vocabulary", "k"), [(1, 1, 1), (1, 7, 3), (5, 37, 36), (9, 37, 37), (130, 259, 32)])
def test_buckets_are_those_of_the_full_softmax(rows: int, vocabulary: int, k: int) -> None:
    logits_NV = logits(rows, vocabulary)
    sparse = sparse_topk(logits_NV, k, vocab_size=vocabulary, chunk_tokens=4)
    exact_NV = logits_NV.double().log_softmax(-1)

    expected, order = exact_NV.sort(descending=True)
    torch.testing.assert_close(sparse.logprobs_NK, expected[:, :k].float(), atol=1e-5, rtol=1e-5)
    assert torch.equal(sparse.token_ids_NK, order[:, :k].int())
    torch.testing.assert_close(sparse.tail_logmass_N, expected[:, k:].logsumexp(-1).float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        sparse.entropy_nats_N, -(exact_NV.exp() * exact_NV).sum(-1).float(), atol=1e-5, rtol=1e-5
    )
    mass_N = sparse.logprobs_NK.exp().sum(-1) + sparse.tail_logmass_N.exp()
    torch.testing.assert_close(mass_N, torch.ones(rows), atol=1e-6, rtol=0)


def test_the_whole_vocabulary_leaves_an_empty_tail() -> None:
    sparse = sparse_topk(logits(3, 11), 11, vocab_size=11)
    assert (sparse.tail_logmass_N == -torch.inf).all()
    assert sparse.entropy_nats_N.isfinite().all()


def test_a_tail_far_below_fp32_epsilon_survives() -> None:
    logits_NV = torch.tensor([[0.0, -40.0, -41.0]])
    sparse = sparse_topk(logits_NV, 1, vocab_size=3)
    torch.testing.assert_close(sparse.tail_logmass_N, logits_NV[:, 1:].logsumexp(-1))


def test_padded_columns_hold_no_mass() -> None:
    logits_NV = logits(6, 20)
    padded_NV = torch.cat([logits_NV, torch.full((6, 5), 90.0)], dim=1)
    expected, found = sparse_topk(logits_NV, 8, vocab_size=20), sparse_topk(padded_NV, 8, vocab_size=20)
    for name in ("token_ids_NK", "logprobs_NK", "tail_logmass_N", "entropy_nats_N"):
        assert torch.equal(getattr(found, name), getattr(expected, name))


def test_impossible_tokens_and_low_precision_stay_finite() -> None:
    logits_NV = logits(4, 16).bfloat16()
    logits_NV[:, 3] = -torch.inf
    sparse = sparse_topk(logits_NV[:, ::2], 3, vocab_size=8)  # a view with stride 2
    assert sparse.logprobs_NK.dtype == torch.float32
    assert sparse.logprobs_NK.isfinite().all()
    assert sparse.entropy_nats_N.isfinite().all()


@pytest.mark.parametrize(("k", "vocab_size"), [(0, 5), (6, 5), (2, 9)])
def test_impossible_sizes_are_refused(k: int, vocab_size: int) -> None:
    with pytest.raises(ValueError, match=f"top_k {k}"):
        sparse_topk(logits(2, 8), k, vocab_size=vocab_size)
