"""Answers sampled from a causal language model in batches: the teacher's traces and the student's own rollouts.

Written out instead of `generate` because distillation needs the logits of every step as they were before temperature
and top_p, draws that do not depend on what else is in the batch, and no work for finished rows.

Shapes: B rows still being answered, T tokens, V tokens of the tokenizer, P rows of the embedding (padding included),
K candidates.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

CANDIDATES = 512
"""Tokens sorted for top_p before a full sort is tried: a nucleus is nearly always smaller, and sorting V is slow."""

OnStep = Callable[[list[int], Tensor], None]


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


@dataclass(frozen=True, kw_only=True)
class Rollout:
    prompt_token_ids: list[int]
    response_token_ids: list[int]
    """With the closing EOS where the model wrote one."""
    stop_reason: str
    """"eos" or "length"."""


def derive_seed(seed: int, *names: str | int) -> int:
    """A seed for one row, e.g. derive_seed(config.seed, prompt_id): it depends on the names, not on the row order."""
    text = "\0".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@torch.no_grad()
def rollout(
    model: Any,
    prompts: list[list[int]],
    sampling: Sampling,
    *,
    seeds: list[int],
    eos_token_id: int,
    pad_token_id: int,
    vocab_size: int,
    on_step: OnStep | None = None,
) -> list[Rollout]:
    """Answer a batch of prompts (token ids after the chat template), one answer each, in their order.

    `seeds` has one entry per prompt: a row's random numbers come from its own generator, not its batch.
    `on_step(rows, logits_BV)` is called before every draw with the indices of the rows still answered and the fp32
    logits at temperature 1 from which their next token is drawn: T times for a row with T response tokens.
    ValueError for prompts that cannot be answered; FloatingPointError, naming the rows, if the model yields NaN.
    """
    _check(prompts, seeds)
    if not prompts:
        return []
    device = next(model.parameters()).device
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    input_BT, mask_BT = _left_padded(prompts, pad_token_id, device)
    positions_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    forward_options = {cache_argument(model): cache, "use_cache": True, "logits_to_keep": 1}

    responses: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))
    while True:
        logits_BTV = model(
            input_ids=input_BT, attention_mask=mask_BT, position_ids=positions_BT, **forward_options
        ).logits
        logits_BV = _over_vocabulary(logits_BTV[:, -1], vocab_size, rows)
        if on_step is not None:
            on_step(list(rows), logits_BV)
        token_B = draw(logits_BV, sampling, [generators[row] for row in rows])
        tokens = token_B.tolist()
        for row, token in zip(rows, tokens, strict=True):
            responses[row].append(token)

        going_on = [
            index
            for index, (row, token) in enumerate(zip(rows, tokens, strict=True))
            if token != eos_token_id and len(responses[row]) < sampling.max_new_tokens
        ]
        if not going_on:
            break
        if len(going_on) < len(rows):
            kept_B = torch.tensor(going_on, device=device)
            cache.batch_select_indices(kept_B)
            rows = [rows[index] for index in going_on]
            token_B, mask_BT, positions_BT = token_B[kept_B], mask_BT[kept_B], positions_BT[kept_B]
        input_BT = token_B[:, None]
        mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(rows), 1)], dim=1)
        positions_BT = positions_BT[:, -1:] + 1

    return [
        Rollout(
            prompt_token_ids=prompt,
            response_token_ids=response,
            stop_reason="eos" if response[-1] == eos_token_id else "length",
        )
        for prompt, response in zip(prompts, responses, strict=True)
    ]


def draw(logits_BV: Tensor, sampling: Sampling, generators: list[torch.Generator]) -> Tensor:
    """[B] one token per row by inverse transform: one uniform number from the row's generator, whatever the rest is."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    uniform_B1 = torch.stack([torch.rand(1, generator=generator, dtype=torch.float64) for generator in generators])
    probs_BV = torch.softmax(logits_BV / sampling.temperature, dim=-1)
    uniform_B1 = uniform_B1.to(logits_BV.device)
    if sampling.top_p == 1:
        mass_BV = probs_BV.double().cumsum(-1)
        return torch.searchsorted(mass_BV, uniform_B1 * mass_BV[:, -1:], right=True).clamp(max=mass_BV.shape[-1] - 1)[
            :, 0
        ]
    return _draw_from_nucleus(probs_BV, sampling.top_p, uniform_B1, CANDIDATES)


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
            token_B[beyond_B] = _draw_from_nucleus(probs_BV[beyond_B], top_p, uniform_B1[beyond_B], probs_BV.shape[-1])
    return token_B


def _over_vocabulary(logits_BP: Tensor, vocab_size: int, rows: list[int]) -> Tensor:
    """[B, V] in fp32 without the P - V padded rows: the softmax is that of masking them to -inf."""
    if logits_BP.shape[-1] < vocab_size:
        raise ValueError(
            f"the model scores {logits_BP.shape[-1]} tokens, its tokenizer has {vocab_size}: the two do not fit"
        )
    logits_BV = logits_BP[:, :vocab_size].float()
    nan_B = logits_BV.isnan().any(-1)
    if nan_B.any():
        broken = [row for row, is_nan in zip(rows, nan_B.tolist(), strict=True) if is_nan]
        raise FloatingPointError(f"the model's logits are NaN for rows {broken} of the batch")
    return logits_BV


def _left_padded(prompts: list[list[int]], pad_token_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    longest = max(map(len, prompts))
    ids = [[pad_token_id] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def cache_argument(model: Any) -> str:
    """transformers 5.2x renamed the argument; passing the old name still works there but warns."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _check(prompts: list[list[int]], seeds: list[int]) -> None:
    if len(seeds) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts with {len(seeds)} seeds: one seed per prompt is needed")
    empty = [row for row, prompt in enumerate(prompts) if not prompt]
    if empty:
        raise ValueError(f"prompts {empty} have no tokens: an answer needs at least one")
