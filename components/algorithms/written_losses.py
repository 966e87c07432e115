"""Objectives that need only the log-probabilities of the tokens that were written, not whole distributions.

Each takes `Written` and returns nats per token, so that a recipe adds them to the objectives of losses.py by name and
weight. Shapes: N tokens, V vocabulary of the tokenizer, S sequences, G prompts, M answers to each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Written:
    """N written tokens; all but `student_N` without a gradient, all in nats but the weight."""

    student_N: Tensor
    """log pi_S of the token, differentiable: at temperature 1, or of the distribution that was drawn from."""
    teacher_N: Tensor | None = None
    """log pi_T of the token at temperature 1, where the teacher is at hand."""
    drawn_N: Tensor | None = None
    """log-probability that the token was drawn with, under the weights of that time."""
    later_N: Tensor | None = None
    """Discounted sum of the advantages of the tokens after it; None is a discount of 0. With a discount of 1 the
    gradient is that of the reverse KL of whole sequences (MiniLLM, arXiv 2306.08543).
    """
    weight_N: Tensor | None = None
    """Importance weight of the token's sequence, 1 on average."""
    advantage_N: Tensor | None = None
    """Of the token's sequence among the answers to its prompt, as a verifier judged them (`group_advantages`)."""


def next_token(written: Written) -> Tensor:
    """[N] negative log-likelihood of what somebody else wrote (hard targets; sequence-level distillation)."""
    return -written.student_N


def sampled_reverse_kl(written: Written) -> Tensor:
    """[N] the reverse KL by the one token that the student drew: A_t = −(log pi_S(y_t) − log pi_T(y_t)) as advantage.

    The value estimates KL(S ‖ T) and the gradient is −A_t * ∇log pi_S(y_t), whose mean over draws is the gradient of
    `reverse_kl` at that token. Rollouts wait in a buffer, so a token counts by pi_S now over pi_S when it was drawn;
    one on the edge of a nucleus, outside it at one of the two times, counts nothing.
    """
    assert written.teacher_N is not None
    possible_N, ratio_N = _since_drawn(written)
    advantage_N = (written.teacher_N - written.student_N.detach()).masked_fill(~possible_N, 0.0)
    if written.later_N is not None:
        advantage_N = advantage_N + written.later_N
    return -advantage_N * ratio_N


def sharpening(written: Written) -> Tensor:
    """[N] −W * log pi_S(y_t): over the tokens of particles, cross-entropy to the sharpened teacher (sharpening.py)."""
    assert written.weight_N is not None
    return -written.weight_N * written.student_N


def verifier(written: Written) -> Tensor:
    """[N] −A * pi_S(y_t) now over then, A the advantage of the whole answer: policy gradient by a rule that says
    whether an answer is right, relative to its group (GRPO, arXiv 2402.03300, eq. 3, without its clipping and its KL:
    the KL of a recipe is another term). The value is about 0 by construction; what falls is the share of wrong answers.
    """
    assert written.advantage_N is not None
    _, ratio_N = _since_drawn(written)
    return -written.advantage_N * ratio_N


def _since_drawn(written: Written) -> tuple[Tensor, Tensor]:
    """[N] whether the token can be drawn now and could then, and pi_S now over then, 0 where not."""
    assert written.drawn_N is not None
    possible_N = (written.student_N.detach() > -torch.inf) & (written.drawn_N > -torch.inf)
    return possible_N, (written.student_N - written.drawn_N).masked_fill(~possible_N, -torch.inf).exp()


WRITTEN_OBJECTIVES: dict[str, Callable[[Written], Tensor]] = {
    "next_token": next_token,
    "sampled_reverse_kl": sampled_reverse_kl,
    "sharpening": sharpening,
    "verifier": verifier,
}


def group_advantages(reward_GM: Tensor) -> Tensor:
    """[G, M] (reward − mean) / standard deviation over the M answers to each of G prompts: mean 0, variance 1. 0 for a
    prompt whose answers are all equally good: nothing can be learned from comparing them.
    """
    centred_GM = reward_GM - reward_GM.mean(-1, keepdim=True)
    deviation_G1 = centred_GM.square().mean(-1, keepdim=True).sqrt()
    return torch.where(deviation_G1 > 0, centred_GM / deviation_G1.where(deviation_G1 > 0, 1.0), 0.0)


def discounted_later(reward_N: Tensor, lengths_S: list[int], discount: float) -> Tensor:
    """[N] for each token the sum of discount^(s − t) * reward_s over the tokens s after it in its own sequence.

    `lengths_S` says how many of the N tokens belong to each sequence, one after another.
    """
    assert sum(lengths_S) == len(reward_N)
    later_N = torch.zeros_like(reward_N)
    end = 0
    for length in lengths_S:
        start, end = end, end + length
        for t in range(end - 2, start - 1, -1):
            later_N[t] = discount * (reward_N[t + 1] + later_N[t + 1])
    return later_N


def drawn_from(logprobs_NV: Tensor, temperature: float, top_p: float) -> Tensor:
    """[N, V] log-probabilities at `temperature`, cut to the smallest set of mass >= `top_p` and normalised again: the
    distribution of `rollouts.Sampling`. −inf outside the set, which has no gradient. ValueError for temperature 0, of
    which there is no density.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature}: greedy answers were not drawn from a distribution")
    if temperature == 1 and top_p == 1:
        return logprobs_NV
    tempered_NV = (logprobs_NV / temperature).log_softmax(-1)
    if top_p == 1:
        return tempered_NV
    with torch.no_grad():
        falling_NV, order_NV = tempered_NV.exp().sort(dim=-1, descending=True, stable=True)
        before_NV = falling_NV.double().cumsum(-1) - falling_NV.double()
        inside_NV = torch.zeros_like(falling_NV, dtype=torch.bool).scatter(-1, order_NV, before_NV < top_p)
    return tempered_NV.masked_fill(~inside_NV, -torch.inf).log_softmax(-1)
