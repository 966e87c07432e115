"""Range alignment against numpy in float64, and the published form of it, which is a trap."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reflux.components.algorithms.losses import forward_kl
from reflux.components.algorithms.range_alignment import clipped, range_alignment, range_alignment_of_kept
from reflux.kernels.topk_kl import bucketed

WIDTH = 14.0


def logits(seed: int, *, tokens: int = 6, words: int = 40, spread: float = 8.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(tokens, words, dtype=torch.float64, generator=generator)


def literal(student: np.ndarray, teacher: np.ndarray, width: float) -> np.ndarray:
    """From the logits themselves."""
    target = np.clip(teacher - teacher.max(-1, keepdims=True), -width, 0)
    return ((target - (student - student.max(-1, keepdims=True))) ** 2).sum(-1)


def test_equals_numpy_whether_logits_or_log_probabilities_are_given() -> None:
    student_NV, teacher_NV = logits(0), logits(1)
    expected = literal(student_NV.numpy(), teacher_NV.numpy(), WIDTH)
    for a, b in ((student_NV, teacher_NV), (student_NV.log_softmax(-1), teacher_NV.log_softmax(-1) + 3)):
        np.testing.assert_allclose(range_alignment(a, b, WIDTH).numpy(), expected, rtol=1e-9)


def test_the_gradient_by_finite_differences() -> None:
    student_NV = logits(2, tokens=2, words=7).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: range_alignment(x.log_softmax(-1), logits(3, tokens=2, words=7), 5.0),
                                    student_NV)  # fmt: skip


def test_it_vanishes_at_the_clipped_teacher_and_nowhere_pulls_up_what_the_range_holds() -> None:
    teacher_NV = logits(4)
    goal_NV = clipped(teacher_NV, WIDTH).requires_grad_()
    value_N = range_alignment(goal_NV, teacher_NV, WIDTH)
    assert not value_N.any()
    assert not torch.autograd.grad(value_N.sum(), goal_NV)[0].any()
    narrow_NV = logits(5, spread=1.0)  # spans less than the range: nothing is clipped
    assert torch.equal(clipped(narrow_NV, WIDTH), narrow_NV - narrow_NV.amax(-1, keepdim=True))


def test_the_published_clip_changes_the_teacher_and_ours_does_not() -> None:
    """Logits that span about ±38, as SmolLM2's do: cut at ±7 the likeliest words become equally likely."""
    teacher_NV = logits(6, tokens=50, words=2000, spread=10.0)
    whole_NV = teacher_NV.log_softmax(-1)
    published_NV, ours_NV = teacher_NV.clamp(-7, 7).log_softmax(-1), clipped(teacher_NV, WIDTH).log_softmax(-1)
    assert teacher_NV.abs().max() > 30
    assert forward_kl(published_NV, whole_NV).mean() > 3  # nats
    assert forward_kl(ours_NV, whole_NV).mean() < 0.02
    assert torch.equal(ours_NV.argmax(-1), whole_NV.argmax(-1))
    assert (published_NV.amax(-1) < whole_NV.amax(-1) - 3).float().mean() > 0.9


@pytest.mark.parametrize("kept", [1, 5, 39, 40])
def test_a_stored_top_k_gives_a_part_of_it_and_the_whole_vocabulary_gives_all(kept: int) -> None:
    student_NV, teacher_NV = logits(7).log_softmax(-1), logits(8).log_softmax(-1)
    ids_NK = teacher_NV.topk(kept).indices
    buckets = bucketed(student_NV, ids_NK), bucketed(teacher_NV, ids_NK)
    part_N = range_alignment_of_kept(*buckets, WIDTH, student_NV.amax(-1))
    student, teacher = student_NV.numpy(), teacher_NV.numpy()
    target = np.clip(teacher - teacher.max(-1, keepdims=True), -WIDTH, 0)
    each = (target - (student - student.max(-1, keepdims=True))) ** 2
    np.testing.assert_allclose(part_N.numpy(), np.take_along_axis(each, ids_NK.numpy(), -1).sum(-1), rtol=1e-6)
    whole_N = range_alignment(student_NV, teacher_NV, WIDTH)
    assert (part_N <= whole_N + 1e-9).all()
    if kept == 40:
        torch.testing.assert_close(part_N, whole_N)


def test_words_that_the_teacher_excludes_are_pulled_to_the_range_and_no_further() -> None:
    teacher_NV = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    student_NV = torch.tensor([[0.0, -14.0, -20.0]]).log_softmax(-1)
    assert range_alignment(student_NV, teacher_NV, WIDTH).item() == pytest.approx(36.0, rel=1e-5)
