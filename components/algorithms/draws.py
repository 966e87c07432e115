"""One token for each row of logits: which distribution is drawn from, and draws that do not depend on the rest of a
batch.

Shapes: B rows, V tokens of the vocabulary, K candidates of a nucleus, J blocks of W tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

CANDIDATES = 64
"""Tokens sorted for top_p at first, then eight times as many, and so on: most nuclei are small, and sorting V is slow.
"""
BLOCK = 256
"""Tokens whose mass is summed before it is known in which of them the draw falls: cumulating all V is slow."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The distribution that is drawn from: softmax(logits / temperature), cut to the smallest set of mass >= top_p."""

    temperature: float = 0.7
    """0 takes the most likely token."""
    top_p: float = 0.9
    max_new_tokens: int = 96

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature {self.temperature}: must be 0 (greedy) or a positive number")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p}: must be in (0, 1]")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens {self.max_new_tokens}: must be at least 1")


def derive_seed(seed: int, *names: str | int) -> int:
    """A seed for one row, e.g. derive_seed(config.seed, prompt_id): it depends on the names, not on the row order."""
    text = "\0".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def draw(logits_BV: Tensor, sampling: Sampling, generators: list[torch.Generator]) -> Tensor:
    """[B] one token per row by inverse transform: one uniform number from the row's generator, whatever the rest is."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    uniform_B1 = torch.stack([torch.rand(1, generator=generator, dtype=torch.float64) for generator in generators])
    uniform_B1 = uniform_B1.to(logits_BV.device)
    if sampling.top_p == 1:
        return _draw_from_all(logits_BV, sampling.temperature, uniform_B1)
    probs_BV = torch.softmax(logits_BV / sampling.temperature, dim=-1)
    return _draw_from_nucleus(probs_BV, sampling.top_p, uniform_B1, CANDIDATES)


def _draw_from_all(logits_BV: Tensor, temperature: float, uniform_B1: Tensor) -> Tensor:
    """First the block in which the draw falls, then the token: one pass over V instead of a cumulated sum. argmax finds
    the last block, and the last token, that has any mass.
    """
    rows, vocabulary = logits_BV.shape
    weight_BJW = logits_BV.new_zeros(rows, -(-vocabulary // BLOCK), BLOCK)
    weight_BV = weight_BJW.view(rows, -1)[:, :vocabulary]
    torch.sub(logits_BV, logits_BV.amax(-1, keepdim=True), out=weight_BV)
    weight_BV.div_(temperature).exp_()
    mass_BJ = weight_BJW.sum(-1).double()
    until_BJ = mass_BJ.cumsum(-1)
    target_B1 = uniform_B1 * until_BJ[:, -1:]
    block_B1 = torch.searchsorted(until_BJ, target_B1, right=True).minimum(until_BJ.argmax(-1, keepdim=True))
    before_B1 = until_BJ.gather(1, block_B1) - mass_BJ.gather(1, block_B1)
    share_B1 = (target_B1 - before_B1) / mass_BJ.gather(1, block_B1)

    within_BW = weight_BJW[torch.arange(rows, device=logits_BV.device), block_B1[:, 0]].double().cumsum(-1)
    index_B1 = torch.searchsorted(within_BW, share_B1 * within_BW[:, -1:], right=True)
    return (block_B1 * BLOCK + index_B1.minimum(within_BW.argmax(-1, keepdim=True)))[:, 0]


def _draw_from_nucleus(probs_BV: Tensor, top_p: float, uniform_B1: Tensor, candidates: int) -> Tensor:
    width = min(candidates, probs_BV.shape[-1])
    probs_BK, ids_BK = probs_BV.topk(width)
    mass_BK = probs_BK.double().cumsum(-1)
    nucleus_size_B1 = (mass_BK < top_p).sum(-1, keepdim=True).add(1).clamp(max=width)
    nucleus_mass_B1 = mass_BK.gather(1, nucleus_size_B1 - 1)
    index_B1 = torch.searchsorted(mass_BK, uniform_B1 * nucleus_mass_B1, right=True).minimum(nucleus_size_B1 - 1)
    token_B = ids_BK.gather(1, index_B1)[:, 0]
    if width < probs_BV.shape[-1]:
        beyond_B = mass_BK[:, -1] < top_p
        if beyond_B.any():
            token_B[beyond_B] = _draw_from_nucleus(probs_BV[beyond_B], top_p, uniform_B1[beyond_B], 8 * candidates)
    return token_B
