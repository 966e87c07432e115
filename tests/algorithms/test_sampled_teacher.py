"""Counted draws: unbiased for what is linear in the teacher, by Monte Carlo and in the gradient; never worse than
independent draws.
"""

from __future__ import annotations

import pytest
import torch

from reflux.components.algorithms.losses import forward_kl, sampled_forward_kl
from reflux.components.algorithms.sampled_teacher import sampled_counts

V, PADDED, DRAWS, RUNS = 11, 13, 6, 4000


def logits(seed: int, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(1, PADDED, generator=torch.Generator().manual_seed(seed)) * scale


def drawn_shares(teacher_NP: torch.Tensor) -> torch.Tensor:
    """[RUNS, V] share of the draws of each token, every row from a seed of its own."""
    generators = [torch.Generator().manual_seed(seed) for seed in range(RUNS)]
    drawn = sampled_counts(teacher_NP.expand(RUNS, -1), DRAWS, vocab_size=V, generators=generators)
    assert (drawn.counts_NU.sum(-1) == DRAWS).all()
    return torch.zeros(RUNS, V).scatter_add(1, drawn.token_ids_NU.long(), drawn.counts_NU / DRAWS)


def test_value_and_gradient_of_the_forward_kl_are_unbiased() -> None:
    teacher_NP, student = logits(0), logits(1)[:, :V].requires_grad_()
    teacher_NV = teacher_NP[:, :V].log_softmax(-1)
    entropy_N = torch.special.entr(teacher_NV.exp()).sum(-1)
    ids_RV = torch.arange(V).expand(RUNS, V)
    estimates_R = sampled_forward_kl(
        student.log_softmax(-1).expand(RUNS, V), ids_RV, drawn_shares(teacher_NP), entropy_N.expand(RUNS)
    )
    exact = forward_kl(student.log_softmax(-1), teacher_NV)[0]
    standard_error = estimates_R.std() / RUNS**0.5
    assert abs(estimates_R.mean() - exact) < 4 * standard_error
    assert standard_error < 0.02 * exact

    (of_exact,) = torch.autograd.grad(exact, student, retain_graph=True)
    (of_estimates,) = torch.autograd.grad(estimates_R.mean(), student)
    shares_RV = drawn_shares(teacher_NP)  # the gradient is softmax(student) - shares, so this is its spread as well
    assert ((of_estimates - of_exact).abs() <= 4 * shares_RV.std(0) / RUNS**0.5 + 1e-6).all()


def test_the_cut_to_the_same_number_of_tokens_is_not() -> None:
    teacher_NV = logits(0)[:, :V].log_softmax(-1)
    student_NV = logits(1)[:, :V].log_softmax(-1)
    entropy_N = torch.special.entr(teacher_NV.exp()).sum(-1)
    kept, ids = teacher_NV.topk(3)
    cut = sampled_forward_kl(student_NV, ids, kept.softmax(-1), entropy_N)
    assert (cut - forward_kl(student_NV, teacher_NV)).abs() > 0.05


def test_the_variance_is_not_above_that_of_independent_draws() -> None:
    shares_RV = drawn_shares(logits(2))
    probability_V = logits(2)[0, :V].softmax(-1)
    independent_V = probability_V * (1 - probability_V) / DRAWS
    assert (shares_RV.var(0) <= independent_V * 1.1 + 1e-6).all()
    assert shares_RV.var(0).sum() < 0.5 * independent_V.sum()


def test_each_row_has_its_own_draws_and_padding_is_never_drawn() -> None:
    rows_NP = torch.cat([logits(seed) for seed in range(5)])
    rows_NP[:, V:] = 50.0
    alone = [
        sampled_counts(rows_NP[n : n + 1], DRAWS, vocab_size=V, generators=[torch.Generator().manual_seed(n)])
        for n in range(5)
    ]
    together = sampled_counts(
        rows_NP, DRAWS, vocab_size=V, generators=[torch.Generator().manual_seed(n) for n in range(5)]
    )
    for n, row in enumerate(alone):
        used = row.counts_NU[0] > 0
        width = int(used.sum())
        assert torch.equal(together.token_ids_NU[n, :width], row.token_ids_NU[0, :width])
        assert torch.equal(together.counts_NU[n, :width], row.counts_NU[0, :width])
        assert (together.counts_NU[n, width:] == 0).all()
        assert (row.token_ids_NU < V).all()
        assert (row.token_ids_NU[0, :width].diff() > 0).all()


def test_one_certain_token_takes_every_draw() -> None:
    certain = torch.full((1, V), -1e4)
    certain[0, 7] = 0
    drawn = sampled_counts(certain, 5, vocab_size=V, generators=[torch.Generator().manual_seed(0)])
    assert (drawn.token_ids_NU.tolist(), drawn.counts_NU.tolist()) == ([[7]], [[5]])


@pytest.mark.parametrize("draws", [0, 70_000])
def test_a_number_of_draws_that_cannot_be_stored_is_refused(draws: int) -> None:
    with pytest.raises(ValueError, match=f"draws {draws}: must be between 1 and 65535"):
        sampled_counts(logits(0), draws, vocab_size=V, generators=[torch.Generator()])


def test_an_unused_place_adds_nothing_whatever_stands_in_it() -> None:
    student_NV = torch.tensor([[-torch.inf, -0.5, -1.0]], requires_grad=True)
    loss = sampled_forward_kl(student_NV, torch.tensor([[1, 0]]), torch.tensor([[1.0, 0.0]]), torch.zeros(1))
    loss.sum().backward()
    assert loss.item() == 0.5
    assert student_NV.grad is not None
    assert student_NV.grad.tolist() == [[0, -1, 0]]
