"""An lm_head and its divergence from a sparse teacher in one: K token ids, their log-probabilities, the others' mass.

The student's vocabulary is cut into the teacher's buckets, K tokens and one for all others. With z the logits, the
bucket's logit is u_k = z of its token, and u_tail = logsumexp of z over the others, never 1 − the kept mass, so that a
tail of 1e-12 survives. Then s = log_softmax(u) are the buckets' log-probabilities, and any divergence f(s, t) from the
teacher's t applies to them as to a small vocabulary.

Gradient: with g_b = ∂f/∂s_b and G = Σ g_b, ∂f/∂u_b = g_b − G exp(s_b), and

    ∂f/∂z_v = ∂f/∂u_k                             for the token v of bucket k
    ∂f/∂z_v = ∂f/∂u_tail · exp(z_v − u_tail)      for every other v

For the forward KL g = −exp(t), hence softmax(z)_v − exp(t_k) on the support, and off it the student's tail mass less
the teacher's, dealt out as the student deals its tail. Only `bucket_logits` touches the vocabulary and is fused; what
comes after works on [N, K + 1], by torch's own differentiation. Hence all divergences share one kernel, and the one
token that was written is served by it too.

Shapes: N tokens, D hidden, V vocabulary, K kept tokens.
"""

from __future__ import annotations

import torch

from reflux.kernels.dispatch import on_triton
from reflux.kernels.divergences import divergence, jsd
from reflux.kernels.lm_head import LmHead

from .reference import bucketed

__all__ = ["bucket_logits", "bucketed", "topk_kl"]


def bucket_logits(hidden_ND: torch.Tensor, head: LmHead, token_ids_NK: torch.Tensor) -> torch.Tensor:
    """[N, K + 1] float32: the logits of each token's own K words, and the logsumexp of all other words of the
    vocabulary; differentiable in the hidden states and the head's weight.

    ValueError for ids that are outside the vocabulary or stand twice in a row, and for hidden states that the head
    cannot read. The device of the hidden states decides what runs: on a GPU the Triton kernel, which never holds
    [N, V]; elsewhere the reference, which does, so that a caller with many tokens gives it a few at a time.
    """
    head.require_fitting(hidden_ND)
    _require_distinct(token_ids_NK, len(hidden_ND), head.vocab_size)
    if on_triton(hidden_ND.device):
        from .kernel import BucketLogits  # Triton is only there where a GPU is

        return BucketLogits.apply(hidden_ND, head.weight_PD, head, token_ids_NK)
    return bucketed(head.logits(hidden_ND), token_ids_NK.long())


def topk_kl(
    hidden_ND: torch.Tensor,
    head: LmHead,
    token_ids_NK: torch.Tensor,
    logprobs_NK: torch.Tensor,
    tail_logmass_N: torch.Tensor,
    *,
    beta: float = 0.0,
) -> torch.Tensor:
    """[N] nats: the divergence of the student's buckets from the teacher's, whose log-probabilities are those of its
    full softmax and whose tail may be -inf.

    `beta` is that of `divergences.jsd`: 0 is KL(teacher ‖ student), 1 is KL(student ‖ teacher). Otherwise as
    `bucket_logits`.
    """
    mixture = jsd(beta)
    if logprobs_NK.shape != token_ids_NK.shape or tail_logmass_N.shape != token_ids_NK.shape[:1]:
        found = tuple(logprobs_NK.shape), tuple(tail_logmass_N.shape)
        raise ValueError(f"logprobs_NK and tail_logmass_N {found}: token_ids_NK is {tuple(token_ids_NK.shape)}")
    student_NB = bucket_logits(hidden_ND, head, token_ids_NK).log_softmax(-1)
    teacher_NB = torch.cat([logprobs_NK, tail_logmass_N[:, None]], dim=-1).to(student_NB.dtype)
    return divergence(student_NB, teacher_NB, mixture)


def _require_distinct(token_ids_NK: torch.Tensor, tokens: int, vocab_size: int) -> None:
    if token_ids_NK.ndim != 2 or len(token_ids_NK) != tokens:
        raise ValueError(f"token_ids_NK {tuple(token_ids_NK.shape)}: {tokens} rows are needed")
    if not token_ids_NK.numel():
        return
    ordered_NK = token_ids_NK.sort(-1).values
    low, high = ordered_NK[:, 0].min(), ordered_NK[:, -1].max()
    repeats = (ordered_NK[:, 1:] == ordered_NK[:, :-1]).sum()
    low, high, repeats = torch.stack([low.long(), high.long(), repeats]).tolist()  # one wait for the GPU, not three
    if low < 0 or high >= vocab_size:
        raise ValueError(f"token_ids_NK {low if low < 0 else high}: must be from 0 to below vocab_size {vocab_size}")
    if repeats:
        raise ValueError(f"token_ids_NK: {repeats} ids stand twice in their row, each must stand once")
