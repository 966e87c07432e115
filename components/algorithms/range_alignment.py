"""Keep the student's logits within the range that low-bit logits can hold: lambda * ‖clip(z_T − max z_T, −w, 0) −
(z_S − max z_S)‖².

Only differences of logits mean something, so both sides are measured from their own largest one. A softmax does not see
what lies `w` = 14 below that (e^−14 is a millionth), and a grid should not be spent on it. The published form, clip(z,
−7, 7), cuts at fixed heights instead: where logits span ±38 it makes the likely tokens equal and destroys the teacher.

z − max z = log p − max log p, so log-probabilities serve as well as logits. Shapes: N tokens, V vocabulary of the
tokenizer, B = K + 1 buckets of a stored top k.
"""

from __future__ import annotations

from torch import Tensor


def clipped(logprobs_NV: Tensor, width: float) -> Tensor:
    """[N, V] log-probabilities below their largest one, and none further below than `width` nats."""
    return (logprobs_NV - logprobs_NV.amax(-1, keepdim=True)).clamp(min=-width)


def range_alignment(student_NV: Tensor, teacher_NV: Tensor, width: float) -> Tensor:
    """[N] squared nats, summed over the vocabulary: of the order of V times a squared difference, so its weight is
    small, 1e-6 or so beside a divergence.
    """
    below_NV = student_NV - student_NV.amax(-1, keepdim=True)
    return (clipped(teacher_NV, width) - below_NV).square().sum(-1)


def range_alignment_of_kept(student_NB: Tensor, teacher_NB: Tensor, width: float, student_largest_N: Tensor) -> Tensor:
    """[N] the same over the K tokens that a stored top k has kept; its last bucket, the mass of all others, is no
    logit. A sum of squares over fewer tokens: never more than the whole, and equal to it for K = V.

    `student_largest_N` is the student's largest log-probability over all of V, which may be of a token not kept; the
    teacher's is the first that it kept.
    """
    below_NK = student_NB[:, :-1] - student_largest_N[:, None]
    return (clipped(teacher_NB[:, :-1], width) - below_NK).square().sum(-1)
