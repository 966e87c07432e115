"""Power sharpening on a language that can be counted out: four tokens, three steps, 64 sequences."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from reflux.components.algorithms.sharpening import (
    Block,
    Extend,
    Particles,
    absorbed_exponent,
    effective_number,
    power_particles,
    systematic,
)
from reflux.components.algorithms.written_losses import Written, sharpening

V, LENGTH, ALPHA, N = 4, 3, 2.0, 16
SEQUENCES = torch.tensor(list(itertools.product(range(V), repeat=LENGTH)))
PREFIXES = sum(V**t for t in range(LENGTH))
"""A row of logits for each beginning: the empty one, then those of one token, then those of two."""


def table(seed: int) -> Tensor:
    """[PREFIXES, V] log-probabilities of the next token."""
    logits = 1.2 * torch.randn(PREFIXES, V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return logits.log_softmax(-1)


def prefix(tokens_RT: Tensor) -> Tensor:
    """[R] the rows of beginnings of one length."""
    length = tokens_RT.shape[1]
    first = sum(V**t for t in range(length))
    return first + (tokens_RT * V ** torch.arange(length - 1, -1, -1)).sum(-1).long()


def steps(tokens_RT: Tensor) -> Tensor:
    """[R, LENGTH] the rows that whole sequences pass through."""
    return torch.stack([prefix(tokens_RT[:, :t]) for t in range(LENGTH)], -1)


ROWS = steps(SEQUENCES)


def sequence_nats(logits_PV: Tensor) -> Tensor:
    """[64] log-probability of every sequence."""
    return logits_PV.log_softmax(-1)[ROWS, SEQUENCES].sum(-1)


def extend_by(student: Tensor, teacher: Tensor, seed: int, *, block: int = 1, temperature: float = 1 / ALPHA) -> Extend:
    """The next `block` tokens, drawn from the student's table at a temperature."""
    generator = torch.Generator().manual_seed(seed)
    proposal = (student / temperature).log_softmax(-1)

    def extend(answers: list[list[int]], rows: list[int]) -> Block:
        token_RT = torch.tensor([answers[row] for row in rows], dtype=torch.int64)
        before = token_RT.shape[1]
        nats_3R = torch.zeros(3, len(rows), dtype=torch.float64)
        for _ in range(min(block, LENGTH - before)):
            at_R = prefix(token_RT)
            drawn_R = torch.multinomial(proposal[at_R].exp(), 1, generator=generator)[:, 0]
            nats_3R += torch.stack([of_PV[at_R, drawn_R] for of_PV in (proposal, teacher, student)])
            token_RT = torch.cat([token_RT, drawn_R[:, None]], -1)
        return Block(
            token_ids=token_RT[:, before:].tolist(),
            ended=[token_RT.shape[1] == LENGTH] * len(rows),
            proposal_nats_R=nats_3R[0],
            teacher_nats_R=nats_3R[1],
            student_nats_R=nats_3R[2],
        )

    return extend


def run(student: Tensor, teacher: Tensor, seed: int, groups: int = 1, **options: float) -> Particles:
    extend = extend_by(student, teacher, seed, **options)
    return power_particles(extend, range(seed, seed + groups), particles=N, alpha=ALPHA, blocks=LENGTH)


@pytest.mark.parametrize("options", [{}, {"block": 2}, {"temperature": 1.0}], ids=str)
def test_normaliser_and_weighted_sums_are_unbiased(options: dict[str, float]) -> None:
    """Mean of Z_hat is Z, and of Z_hat * Σ W f is Σ p^alpha f, for a student that is not the teacher."""
    teacher = table(1)
    student = (teacher + 0.5 * table(0)).log_softmax(-1)
    power_S = (ALPHA * sequence_nats(teacher)).exp()
    value_S = torch.randn(len(SEQUENCES), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    index = {tuple(y): s for s, y in enumerate(SEQUENCES.tolist())}
    held = run(student, teacher, 0, groups=1500, **options)
    value_GN = value_S[[index[tuple(answer)] for answer in held.answers]].reshape(-1, N)
    normalizer_G = held.log_normalizer_G.exp()
    for estimate_G, exact in (
        (normalizer_G, power_S.sum()),
        (normalizer_G * (held.weights_GN * value_GN).sum(-1), (power_S * value_S).sum()),
    ):
        error = estimate_G.std() / len(estimate_G) ** 0.5
        assert abs(estimate_G.mean() - exact) < 4 * error
        assert error < 0.05 * power_S.sum()  # so that the line above can fail
    assert held.resampled > 100 or options
    assert all(held.ended)


def test_one_particle_and_exact_proposals_have_equal_weights() -> None:
    teacher = table(3)
    alone = power_particles(extend_by(teacher, teacher, 0), [0], particles=1, alpha=ALPHA, blocks=LENGTH)
    assert alone.weights_GN.tolist() == [[1.0]]
    plain = power_particles(
        extend_by(teacher, teacher, 0, temperature=1.0), [0, 1], particles=N, alpha=1.0, blocks=LENGTH
    )
    torch.testing.assert_close(plain.weights_GN, torch.full((2, N), 1 / N, dtype=torch.float64))
    torch.testing.assert_close(plain.log_normalizer_G, torch.zeros(2, dtype=torch.float64), atol=1e-12, rtol=0)
    assert plain.resampled == 0


def test_answers_that_end_early_keep_their_weight_and_are_not_extended() -> None:
    asked: list[list[int]] = []

    def extend(answers: list[list[int]], rows: list[int]) -> Block:
        asked.append(list(rows))
        nats_R = -torch.ones(len(rows), dtype=torch.float64)
        return Block(
            token_ids=[[7]] * len(rows),
            ended=[row == 1 for row in rows],
            proposal_nats_R=nats_R,
            teacher_nats_R=nats_R,
            student_nats_R=nats_R,
        )

    held = power_particles(extend, [0], particles=3, alpha=1.0, blocks=2)
    assert asked == [[0, 1, 2], [0, 2]]
    assert held.answers == [[7, 7], [7], [7, 7]]
    assert held.ended == [False, True, False]
    assert held.teacher_nats_GN.tolist() == [[-2.0, -1.0, -2.0]]


def test_systematic_draws_each_within_one_of_its_share() -> None:
    weights_N = torch.tensor([0.05, 0.55, 0.0, 0.25, 0.15])
    for offset in (0.0, 0.3, 0.999):
        chosen = systematic(weights_N, offset)
        assert chosen == sorted(chosen)
        assert 2 not in chosen
        assert all(abs(chosen.count(n) - 5 * w) < 1 for n, w in enumerate(weights_N.tolist()))


def test_effective_number_counts_equal_weights() -> None:
    log_weight_GN = torch.tensor([[0.0] * 4, [0.0, -torch.inf, 0.0, -torch.inf], [700.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(effective_number(log_weight_GN), torch.tensor([4.0, 2.0, 1.0]))


def test_absorbed_exponent_is_that_of_the_power() -> None:
    teacher_S = sequence_nats(table(4))
    weights_S = sequence_nats(table(5)).exp()
    for exponent in (0.5, 1.0, 2.0):
        student_S = (exponent * teacher_S).log_softmax(-1)
        found = absorbed_exponent(student_S[None], teacher_S[None], weights_S[None])
        assert found == pytest.approx(exponent)


def trained(
    steps_taken: int, *, anchor: float, particles: int = N, temperature: float = 1 / ALPHA
) -> list[tuple[float, float]]:
    """The student's distance to pi_alpha, nats, and its absorbed exponent, before training and every 20 steps."""
    teacher = table(6)
    logits_PV = teacher.clone().requires_grad_()
    optimizer = torch.optim.Adam([logits_PV], lr=0.05)
    teacher_S = sequence_nats(teacher)
    target_S = (ALPHA * teacher_S).log_softmax(-1)
    seen = []
    for step in range(steps_taken + 1):
        if step % 20 == 0:
            student_S = sequence_nats(logits_PV.detach())
            away = (target_S.exp() * (target_S - student_S)).sum().item()
            seen.append((away, absorbed_exponent(student_S[None], teacher_S[None], student_S.exp()[None])))
        student = logits_PV.detach().log_softmax(-1)
        extend = extend_by(student, teacher, 1000 + 7 * step, temperature=temperature)
        held = power_particles(extend, range(4), particles=particles, alpha=ALPHA, blocks=LENGTH)
        token_MT = torch.tensor(held.answers)
        rows_MT = steps(token_MT)
        logprobs_MTV = logits_PV.log_softmax(-1)[rows_MT]
        written_MT = logprobs_MTV.gather(-1, token_MT[..., None])[..., 0]
        weight_MT = particles * held.weights_GN.reshape(-1, 1).expand(-1, LENGTH)
        kl_MT = (teacher[rows_MT].exp() * (teacher[rows_MT] - logprobs_MTV)).sum(-1)
        loss_MT = sharpening(Written(student_N=written_MT, weight_N=weight_MT)) + anchor * kl_MT
        optimizer.zero_grad()
        loss_MT.sum(-1).mean().backward()
        optimizer.step()
    return seen


@pytest.mark.parametrize(("anchor", "least", "most"), [(0.0, 1.7, 2.3), (1.0, 1.2, 1.5)])
def test_training_on_the_particles_raises_the_absorbed_exponent(anchor: float, least: float, most: float) -> None:
    """From 1, where the student is the teacher, to alpha without an anchor and to a compromise with one."""
    (before, exponent), *_, (after, absorbed) = trained(40, anchor=anchor)
    assert exponent == pytest.approx(1.0)
    assert after < (0.2 if anchor == 0 else 0.6) * before
    assert least < absorbed < most


@pytest.mark.heavy
def test_what_becomes_of_the_exponent_in_the_long_run(capsys: pytest.CaptureFixture[str]) -> None:
    """A student that has sharpened itself proposes too narrowly at temperature 1 / alpha, unless an anchor holds it."""
    curves = {
        (anchor, particles, temperature): trained(120, anchor=anchor, particles=particles, temperature=temperature)
        for anchor in (0.0, 1.0)
        for particles, temperature in ((16, 0.5), (64, 0.5), (16, 1.0))
    }
    with capsys.disabled():
        for setting, curve in curves.items():
            print(setting, " ".join(f"{away:.3f}/{exponent:.2f}" for away, exponent in curve))
    assert curves[0.0, 16, 0.5][-1][1] > 2.5
    assert curves[0.0, 16, 1.0][-1][1] == pytest.approx(ALPHA, abs=0.1)
    assert 1.2 < curves[1.0, 16, 0.5][-1][1] < 1.5


def test_numbers_that_make_no_weights_are_refused() -> None:
    extend = extend_by(table(0), table(0), 0)
    for change in ({"particles": 0}, {"alpha": 0.0}, {"alpha": float("nan")}, {"blocks": 0}):
        with pytest.raises(ValueError, match="all must be positive"):
            power_particles(extend, [0], **({"particles": 2, "alpha": 2.0, "blocks": 1} | change))
