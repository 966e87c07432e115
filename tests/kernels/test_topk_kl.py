"""The buckets and their divergence against numpy in double precision, term by term, and the places where they break."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from reflux.kernels.divergences import divergence, jsd
from reflux.kernels.lm_head import LmHead
from reflux.kernels.topk_kl import bucket_logits, bucketed, topk_kl

BETAS = pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
N, D, V, P = 5, 7, 23, 29  # tokens, hidden, vocabulary, rows of the head


def models(
    tokens: int = N,
    *,
    scale: float = 1.0,
    soft_cap: float = 0.0,
    dtype: torch.dtype = torch.float64,
    spread: float = 1.0,
) -> tuple[torch.Tensor, LmHead, torch.Tensor]:
    """Hidden states, a head with padded rows, and another model's log-probabilities [N, V]."""
    generator = torch.Generator().manual_seed(tokens)
    hidden_ND = spread * torch.randn(tokens, D, generator=generator, dtype=torch.float64)
    weight_PD = torch.randn(P, D, generator=generator, dtype=torch.float64)
    teacher_NV = (3 * torch.randn(tokens, V, generator=generator, dtype=torch.float64)).log_softmax(-1)
    head = LmHead(weight_PD=weight_PD.to(dtype), vocab_size=V, scale=scale, soft_cap=soft_cap)
    return hidden_ND.to(dtype), head, teacher_NV.to(dtype)


def sparse(teacher_NV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, log-probabilities and the others' log-mass, as a trace stores them."""
    ids_NK = teacher_NV.topk(k).indices
    buckets_NB = bucketed(teacher_NV, ids_NK)
    return ids_NK, buckets_NB[:, :-1], buckets_NB[:, -1]


def golden(
    hidden_D: np.ndarray, weight_PD: np.ndarray, scale: float, soft_cap: float, ids: list[int], teacher_B: np.ndarray,
    beta: float,
) -> float:  # fmt: skip
    """One token's loss in nats, from probabilities."""
    logits_V = weight_PD[:V] @ hidden_D * scale
    if soft_cap:
        logits_V = soft_cap * np.tanh(logits_V / soft_cap)
    chances_V = np.exp(logits_V) / np.exp(logits_V).sum()
    others = [v for v in range(V) if v not in ids]
    student, teacher = [*chances_V[ids], chances_V[others].sum()], np.exp(teacher_B)
    total = 0.0
    for s, t in zip(student, teacher, strict=True):
        mixture = beta * t + (1 - beta) * s
        weights = {0.0: (1.0, 0.0), 1.0: (0.0, 1.0)}.get(beta, (beta, 1 - beta))
        total += sum(w * p * math.log(p / mixture) for w, p in zip(weights, (t, s), strict=True) if p > 0 and w > 0)
    return total


@BETAS
@pytest.mark.parametrize("k", [1, 4, V])
@pytest.mark.parametrize(("scale", "soft_cap"), [(1.0, 0.0), (0.5, 0.0), (1.0, 2.0), (1.7, 3.0)])
def test_equals_numpy(scale: float, soft_cap: float, k: int, beta: float):
    hidden_ND, head, teacher_NV = models(scale=scale, soft_cap=soft_cap)
    ids_NK, logprobs_NK, tail_N = sparse(teacher_NV, k)
    found_N = topk_kl(hidden_ND, head, ids_NK, logprobs_NK, tail_N, beta=beta)
    for n in range(N):
        teacher_B = np.append(logprobs_NK[n].numpy(), tail_N[n].item())
        wanted = golden(
            hidden_ND[n].numpy(), head.weight_PD.numpy(), scale, soft_cap, ids_NK[n].tolist(), teacher_B, beta
        )
        assert found_N[n].item() == pytest.approx(wanted, rel=1e-12, abs=1e-13)


@BETAS
@pytest.mark.parametrize("soft_cap", [0.0, 3.0])
@pytest.mark.parametrize("k", [1, 4, V])
def test_gradients_by_finite_differences(k: int, soft_cap: float, beta: float):
    hidden_ND, head, teacher_NV = models(2, soft_cap=soft_cap, scale=0.7)
    stored = sparse(teacher_NV, k)

    def loss(hidden_ND: torch.Tensor, weight_PD: torch.Tensor) -> torch.Tensor:
        moved = LmHead(weight_PD=weight_PD, vocab_size=V, scale=0.7, soft_cap=soft_cap)
        return topk_kl(hidden_ND, moved, *stored, beta=beta)

    assert torch.autograd.gradcheck(loss, (hidden_ND.requires_grad_(), head.weight_PD.requires_grad_()))


def test_gradient_of_the_logits_is_the_stated_one():
    """Forward KL: softmax − t on the support, and off it the difference of the tails, dealt out as the student does."""
    _, _, teacher_NV = models()
    ids_NK, logprobs_NK, tail_N = sparse(teacher_NV, 4)
    logits_NV = torch.randn(N, V, dtype=torch.float64, requires_grad=True)
    student_NB = bucketed(logits_NV, ids_NK).log_softmax(-1)
    teacher_NB = torch.cat([logprobs_NK, tail_N[:, None]], -1)
    (found_NV,) = torch.autograd.grad(divergence(student_NB, teacher_NB, jsd(0.0)).sum(), logits_NV)
    chances_NV = logits_NV.detach().softmax(-1)
    tail_mass_N = chances_NV.scatter(1, ids_NK, 0.0).sum(-1)
    wanted_NV = chances_NV / tail_mass_N[:, None] * (tail_mass_N - tail_N.exp())[:, None]
    wanted_NV.scatter_(1, ids_NK, chances_NV.gather(1, ids_NK) - logprobs_NK.exp())
    torch.testing.assert_close(found_NV, wanted_NV)


@BETAS
def test_all_of_the_vocabulary_is_the_full_divergence_and_less_is_not_more(beta: float):
    hidden_ND, head, teacher_NV = models(40)
    full_N = divergence(head.logits(hidden_ND).log_softmax(-1), teacher_NV, jsd(beta))
    for k in range(1, V + 1):
        cut_N = topk_kl(hidden_ND, head, *sparse(teacher_NV, k), beta=beta)
        assert (cut_N <= full_N + 1e-12).all()
        if k >= V - 1:  # a tail of one word is that word
            torch.testing.assert_close(cut_N, full_N)
        else:
            assert (cut_N < full_N - 1e-6).any()


def test_a_tail_far_below_rounding_survives():
    """1 − the kept mass is 0 here in float32, and its logarithm −inf."""
    hidden_ND = torch.tensor([[60.0]])
    head = LmHead(weight_PD=torch.tensor([[1.0], [0.0], [0.0]]), vocab_size=3)
    buckets_NB = bucket_logits(hidden_ND, head, torch.tensor([[0]])).log_softmax(-1)
    assert buckets_NB[0, 1].item() == pytest.approx(math.log(2) - 60, rel=1e-6)


@BETAS
def test_a_teacher_without_a_tail(beta: float):
    """All of the stored mass on the support and a student that leaks: infinite only where KL(S ‖ T) is."""
    hidden_ND, head, teacher_NV = models()
    ids_NK, logprobs_NK, _ = sparse(teacher_NV, 4)
    nothing_N = torch.full((N,), -torch.inf, dtype=torch.float64)
    hidden_ND.requires_grad_()
    found_N = topk_kl(hidden_ND, head, ids_NK, logprobs_NK.log_softmax(-1), nothing_N, beta=beta)
    assert (found_N == torch.inf).all() if beta == 1.0 else found_N.isfinite().all()
    if beta < 1.0:
        assert torch.autograd.grad(found_N.sum(), hidden_ND)[0].isfinite().all()


def test_padded_rows_take_no_part():
    hidden_ND, head, teacher_NV = models()
    stored = sparse(teacher_NV, 4)
    loud_PD = head.weight_PD.clone()
    loud_PD[V:] *= 100
    loud_PD.requires_grad_()
    loss_N = topk_kl(hidden_ND, LmHead(weight_PD=loud_PD, vocab_size=V), *stored)
    assert torch.equal(loss_N, topk_kl(hidden_ND, head, *stored))
    (gradient_PD,) = torch.autograd.grad(loss_N.sum(), loud_PD)
    assert (gradient_PD[V:] == 0).all()
    assert (gradient_PD[:V] != 0).any()


def test_tokens_that_count_nothing_have_no_gradient():
    hidden_ND, head, teacher_NV = models(dtype=torch.float32, spread=1e4)
    loss_N = topk_kl(hidden_ND.requires_grad_(), head, *sparse(teacher_NV, 4))
    (loss_N * torch.zeros(N)).sum().backward()
    assert (hidden_ND.grad == 0).all()


def test_no_tokens():
    hidden_ND, head, teacher_NV = models()
    loss_N = topk_kl(hidden_ND[:0], head, *sparse(teacher_NV[:0], 4))
    assert loss_N.shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": [[0, 0], [1, 2]]}, "1 ids stand twice"),
        ({"ids": [[0, V], [1, 2]]}, f"token_ids_NK {V}"),
        ({"ids": [[0, -1], [1, 2]]}, "token_ids_NK -1"),
        ({"ids": [[0, 1]], "tail": torch.zeros(1)}, "2 rows are needed"),
        ({"beta": 1.5}, "1.5"),
        ({"tail": torch.zeros(3)}, "tail_logmass_N"),
        ({"hidden": torch.zeros(2, D + 1)}, "hidden_ND"),
        ({"hidden": torch.zeros(2, D, dtype=torch.float16)}, "float16"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(change: dict, message: str):
    _, head, _ = models(2, dtype=torch.float32)
    ids_NK = torch.tensor(change.get("ids", [[0, 1], [2, 3]]))
    hidden_ND, tail_N = change.get("hidden", torch.zeros(2, D)), change.get("tail", torch.zeros(2))
    with pytest.raises(ValueError, match=message):
        topk_kl(hidden_ND, head, ids_NK, torch.zeros(ids_NK.shape), tail_N, beta=change.get("beta", 0.0))


@pytest.mark.parametrize("change", [{"vocab_size": P + 1}, {"vocab_size": 0}, {"soft_cap": -1.0}], ids=str)
def test_a_head_that_cannot_be_is_refused(change: dict):
    (name,) = change
    with pytest.raises(ValueError, match=name):
        LmHead(**({"weight_PD": torch.zeros(P, D), "vocab_size": V} | change))
