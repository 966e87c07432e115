"""The divergences of losses.py with their gradient in closed form, for distributions over a whole vocabulary.

Autograd through the formulas would keep about a dozen tensors of [N, V] and pass over them thirty times; here the value
and the gradient come out of the same few passes, in place. With s and t the log-probabilities of student and teacher,
m that of the mixture M = a T + (1 − a) S, and w_T, w_S the weights of KL(T ‖ M) and KL(S ‖ M):

    ∂/∂s_v = w_S exp(s_v) (s_v − m_v + 1) − (1 − a) exp(s_v − m_v) (w_T exp(t_v) + w_S exp(s_v))

Of the Jensen-Shannon divergence, w_T = a and w_S = 1 − a, only w_S exp(s_v) (s_v − m_v) is left.

Shapes: N tokens, V vocabulary (or buckets of it).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reflux.kernels.divergences import Mixture


def mixture_divergence(student_NV: Tensor, teacher_NV: Tensor, mixture: Mixture) -> Tensor:
    """[N] nats: `kernels.divergences.divergence`, differentiable once in the student; a token of probability zero adds
    nothing, whatever stands in it.
    """
    return _MixtureDivergence.apply(student_NV, teacher_NV, mixture.share, mixture.of_teacher, mixture.of_student)


class _MixtureDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student_NV: Tensor, teacher_NV: Tensor, share: float, of_teacher: float, of_student: float
    ) -> Tensor:
        mixture_NV = _log_mixture(student_NV, teacher_NV, share)
        value_N = student_NV.new_zeros(len(student_NV))
        grad_NV = torch.zeros(()).to(student_NV)
        balanced = of_teacher * (1 - share) == of_student * share
        if of_teacher:
            p_NV = teacher_NV.exp()
            value_N += of_teacher * _kl_terms(p_NV, teacher_NV, mixture_NV).sum(-1)
            if ctx.needs_input_grad[0] and not balanced and share < 1:
                ratio_NV = 1.0 if share == 0 else (student_NV - mixture_NV).exp_()
                grad_NV = p_NV.mul_(ratio_NV).mul_(-of_teacher * (1 - share))
            del p_NV
        if of_student:
            p_NV = student_NV.exp()
            terms_NV = _kl_terms(p_NV, student_NV, mixture_NV)
            value_N += of_student * terms_NV.sum(-1)
            if ctx.needs_input_grad[0]:
                if not balanced:
                    terms_NV += p_NV
                    if share < 1:
                        terms_NV.addcmul_(p_NV, (student_NV - mixture_NV).exp_(), value=-(1 - share))
                grad_NV = terms_NV.mul_(of_student).add_(grad_NV)
        ctx.save_for_backward(grad_NV)
        return value_N

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_NV,) = ctx.saved_tensors
        return grad_NV * grad_outputs[0][:, None], None, None, None, None


def _log_mixture(student_NV: Tensor, teacher_NV: Tensor, share: float) -> Tensor:
    if share in (0.0, 1.0):
        return student_NV if share == 0.0 else teacher_NV
    mixed_NV = student_NV.exp().lerp_(teacher_NV.exp(), share)
    return mixed_NV.clamp_(min=torch.finfo(mixed_NV.dtype).tiny).log_()


def _kl_terms(p_NV: Tensor, log_p_NV: Tensor, log_q_NV: Tensor) -> Tensor:
    return (log_p_NV - log_q_NV).masked_fill_(p_NV == 0, 0.0).mul_(p_NV)
