"""The chunked loss is the unchunked one: value, gradient of the hidden states, gradient of a trained head."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from reflux.components.algorithms import chunked_loss as module
from reflux.components.algorithms.chunked_loss import chunked_loss
from reflux.components.algorithms.losses import beta_jsd, log_probabilities

V, P, D = 23, 29, 7  # vocabulary, rows of the head with padding, hidden


def setting(tokens: int) -> tuple[torch.Tensor, nn.Linear, Callable[[torch.Tensor, slice], torch.Tensor]]:
    generator = torch.Generator().manual_seed(tokens)
    hidden_ND = torch.randn(tokens, D, generator=generator).requires_grad_()
    head = nn.Linear(D, P)
    with torch.no_grad():
        for p in head.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    teacher_NV = torch.randn(tokens, V, generator=generator).log_softmax(-1)
    weight_N = torch.rand(tokens, generator=generator)

    def token_loss(logits_CP: torch.Tensor, rows: slice) -> torch.Tensor:
        return weight_N[rows] * beta_jsd(log_probabilities(logits_CP, V), teacher_NV[rows], 0.4)

    return hidden_ND, head, token_loss


@pytest.mark.parametrize(("tokens", "chunk"), [(1, 1), (1, 128), (5, 2), (12, 4), (13, 4), (13, 13), (130, 128)])
def test_value_and_gradients_equal_the_unchunked(tokens: int, chunk: int):
    hidden_ND, head, token_loss = setting(tokens)
    trained = list(head.parameters())
    whole = token_loss(head(hidden_ND), slice(0, tokens)).sum()
    expected = torch.autograd.grad(whole * 3, [hidden_ND, *trained])
    found = chunked_loss(hidden_ND, head, token_loss, trained=trained, chunk_tokens=chunk)
    torch.testing.assert_close(found, whole)
    for ours, theirs in zip(torch.autograd.grad(found * 3, [hidden_ND, *trained]), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        torch.testing.assert_close(chunked_loss(hidden_ND, head, token_loss, chunk_tokens=chunk), whole)


def test_a_head_that_is_not_trained_gets_no_gradient():
    hidden_ND, head, token_loss = setting(9)
    chunked_loss(hidden_ND, head, token_loss, chunk_tokens=4).backward()
    assert hidden_ND.grad is not None
    assert all(p.grad is None for p in head.parameters())


def test_hidden_states_that_are_a_view_of_a_larger_graph():
    hidden_ND, head, token_loss = setting(10)
    wide_ND = torch.zeros(10, 2 * D)
    wide_ND[:, ::2] = hidden_ND.detach()
    wide_ND.requires_grad_()
    chunked_loss(wide_ND[:, ::2], head, token_loss, chunk_tokens=3).backward()
    (expected_ND,) = torch.autograd.grad(token_loss(head(hidden_ND), slice(0, 10)).sum(), hidden_ND)
    torch.testing.assert_close(wide_ND.grad[:, ::2], expected_ND)


@pytest.mark.parametrize("enabled", [True, False])
def test_no_tokens_cost_nothing(enabled: bool):
    _, head, token_loss = setting(3)
    hidden_ND = torch.zeros(0, D, dtype=torch.bfloat16, requires_grad=True)
    with torch.set_grad_enabled(enabled):
        total = chunked_loss(hidden_ND, head, token_loss)
    assert total.item() == 0
    assert total.dtype == torch.float32
    if enabled:
        assert torch.autograd.grad(total, hidden_ND)[0].shape == (0, D)


def test_no_more_than_a_chunk_of_logits_is_ever_made():
    hidden_ND, head, token_loss = setting(50)
    rows: list[int] = []

    def counting(x_CD: torch.Tensor) -> torch.Tensor:
        rows.append(len(x_CD))
        return head(x_CD)

    chunked_loss(hidden_ND, counting, token_loss, chunk_tokens=8).backward()
    assert rows == [8] * 6 + [2]  # and nothing is computed twice
    assert module.CHUNK_TOKENS >= 1
