"""Rows of attention recomputed one by one, against the whole map."""

from __future__ import annotations

import pytest
import torch

from reflux.components.algorithms.attention_rows import CHUNK_ROWS, attention_rows, sparse_attention

H, G, T, D = 6, 2, CHUNK_ROWS + 9, 5
SCALING = 0.4


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(H, T, D, generator=generator) * 2, torch.randn(G, T, D, generator=generator) * 2


def whole_map(query_HTd: torch.Tensor, key_GTd: torch.Tensor, allowed_TT: torch.Tensor) -> torch.Tensor:
    maps = []
    for head in range(H):
        scores_TT = query_HTd[head] @ key_GTd[head // (H // G)].T * SCALING
        maps.append(scores_TT.masked_fill(~allowed_TT, -torch.inf).softmax(-1))
    return torch.stack(maps).mean(0)


CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()
SLIDING = CAUSAL & ~torch.ones(T, T, dtype=torch.bool).tril(-7)


@pytest.mark.parametrize("rows", [[0], [40], [3, 17, 18, 40], list(range(T))])
@pytest.mark.parametrize("mask", ["none", "bool", "additive"])
def test_chosen_rows_are_those_of_the_whole_map(rows: list[int], mask: str) -> None:
    allowed = CAUSAL if mask == "none" else SLIDING
    given = {
        "none": None,
        "bool": SLIDING,
        "additive": torch.zeros(T, T).masked_fill(~SLIDING, torch.finfo(torch.float32).min),
    }[mask]
    query, key = inputs()
    ours = attention_rows(query, key, torch.tensor(rows), scaling=SCALING, mask_TT=given)
    torch.testing.assert_close(ours, whole_map(query, key, allowed)[rows], atol=1e-6, rtol=1e-5)


def test_the_largest_weights_are_kept_with_what_they_cover() -> None:
    query, key = inputs()
    rows = torch.arange(T)
    full = whole_map(query, key, CAUSAL)
    sparse = sparse_attention(query, key, rows, 4, scaling=SCALING)
    for row in range(T):
        expected = full[row].sort(descending=True).values[:4]
        torch.testing.assert_close(sparse.weights_RM[row], expected, atol=1e-6, rtol=1e-5)
        seen = min(4, row + 1)
        positions = sparse.positions_RM[row]
        assert (positions[:seen] <= row).all()
        assert (positions[seen:] == -1).all()
        torch.testing.assert_close(full[row, positions[:seen].long()], expected[:seen], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(sparse.coverage_R, sparse.weights_RM.sum(-1))
    torch.testing.assert_close(sparse.entropy_nats_R, torch.special.entr(full).sum(-1), atol=1e-5, rtol=1e-5)


def test_more_places_than_tokens_cover_everything() -> None:
    query, key = inputs()
    sparse = sparse_attention(query, key, torch.tensor([2, 40]), T + 3, scaling=SCALING)
    assert sparse.positions_RM.shape == (2, T + 3)
    torch.testing.assert_close(sparse.coverage_R, torch.ones(2))
    assert (sparse.positions_RM[:, T:] == -1).all()
