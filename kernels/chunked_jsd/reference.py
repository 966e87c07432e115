"""A student and a teacher with their output heads, compared over the whole vocabulary in plain PyTorch: the definition,
the CPU path and the kernel's oracle. Shapes: N tokens, D hidden of either model.
"""

from __future__ import annotations

import torch

from reflux.kernels.divergences import Mixture, divergence
from reflux.kernels.lm_head import LmHead


def dense_divergence(
    hidden_ND: torch.Tensor, head: LmHead, teacher_ND: torch.Tensor, teacher_head: LmHead, mixture: Mixture
) -> torch.Tensor:
    """[N] nats; the teacher gets no gradient."""
    with torch.no_grad():
        teacher_NV = teacher_head.logits(teacher_ND).log_softmax(-1)
    return divergence(head.logits(hidden_ND).log_softmax(-1), teacher_NV, mixture)
