"""The lm_head and a per-token loss in one pass over chunks of tokens: full-vocabulary logits never exist for a whole
batch.

The gradient with respect to the hidden states is taken chunk by chunk while the chunk's logits are there, so nothing
is computed twice and only [chunk, V] is ever held (objectives.md, rule 9). Value and gradient equal those of the
unchunked loss. Shapes: N tokens, C tokens of a chunk, D hidden, P rows of the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .output_head import OutputHead

CHUNK_TOKENS = 32
"""At 49,152 words a chunk's logits take 6 MB: the few tensors of a loss fit the caches of a CPU, and memory."""

TokenLoss = Callable[[torch.Tensor, slice], torch.Tensor]
"""(logits [C, P], which of the N tokens they belong to) -> [C] nats."""


def chunked_loss(
    hidden_ND: torch.Tensor,
    head: OutputHead,
    token_loss: TokenLoss,
    *,
    trained: Sequence[torch.nn.Parameter] = (),
    chunk_tokens: int = CHUNK_TOKENS,
) -> torch.Tensor:
    """The sum of `token_loss` over all N tokens, differentiable in the hidden states and in `trained`, parameters of
    the head.
    """
    if torch.is_grad_enabled():
        return _Chunked.apply(head, token_loss, chunk_tokens, hidden_ND, *trained)
    parts = [token_loss(head(hidden_ND[rows]), rows).sum() for rows in _chunks(len(hidden_ND), chunk_tokens)]
    return torch.stack(parts).sum() if parts else hidden_ND.new_zeros((), dtype=torch.float32)


def _chunks(tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, min(start + chunk_tokens, tokens)) for start in range(0, tokens, chunk_tokens)]


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head: torch.nn.Module,
        token_loss: TokenLoss,
        chunk_tokens: int,
        hidden_ND: torch.Tensor,
        *trained: Any,
    ) -> torch.Tensor:
        total = hidden_ND.new_zeros((), dtype=torch.float32)
        grad_ND = torch.zeros_like(hidden_ND)
        grads = [torch.zeros_like(p) for p in trained]
        for rows in _chunks(len(hidden_ND), chunk_tokens):
            hidden_CD = hidden_ND[rows].detach().requires_grad_()
            with torch.enable_grad():
                loss = token_loss(head(hidden_CD), rows).sum()
            grad_ND[rows], *of_head = torch.autograd.grad(loss, [hidden_CD, *trained])
            for sum_of, part in zip(grads, of_head, strict=True):
                sum_of += part
            total += loss.detach()
        ctx.save_for_backward(grad_ND, *grads)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (scale,) = grad_outputs
        return (None, None, None, *(grad * scale for grad in ctx.saved_tensors))
