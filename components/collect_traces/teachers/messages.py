"""What an OpenAI-compatible server is asked, and what it must have said for its answer to be believed.

Token ids are everything: the prompt's must be ours, the answer's must decode to its text, and every alternative must
come as an id, because texts of tokens are not unique. Log-probabilities must be those of the model at temperature 1.

Shapes: T response tokens, K kept entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reflux.components.algorithms.draws import derive_seed
from reflux.components.algorithms.key_tokens import Evidence, key_token_score
from reflux.components.algorithms.sparse_teacher import SparseTeacher
from reflux.components.collect_traces.answers import Answer
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.collect_traces.prompts import Prompt

PATHS = {"completions": "/completions", "chat": "/chat/completions"}
RESOLUTION = 1e-7
"""Probabilities travel in single precision: less than this cannot be told from 1 minus the kept ones."""
IMPOSSIBLE_NATS = -1000.0
"""Servers write -9999 for a probability of zero, which a softmax never gives."""
MOST_MASS = 1.001
SAME_NATS = 0.25
"""Mean over the kept entries: above what low precision does to them, below what a temperature of 0.7 does to a tail."""
AFTER_SAMPLING = (
    "the server reports probabilities after temperature and top_p, traces hold those of the model itself; start vLLM "
    "with --logprobs-mode raw_logprobs"
)
_ID = "token_id:"

Step = tuple[int, list[tuple[int, float]]]
"""A token, and the likeliest tokens in its place with their log-probabilities, in any order."""


def request(model: str, prompt: Prompt, config: CollectTracesConfig) -> dict[str, Any]:
    """The body that asks for one answer; every knob of sampling is set, since servers take defaults from the model."""
    asked: dict[str, Any] = {
        "model": model,
        "max_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": derive_seed(config.seed, prompt.prompt_id),
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if config.server_api == "chat":
        messages = [{"role": "user", "content": prompt.text}]
        return asked | {"messages": messages, "logprobs": True, "top_logprobs": config.top_k}
    return asked | {"prompt": prompt.token_ids, "logprobs": config.top_k}


def read_answer(said: Any, prompt: Prompt, tokenizer: Any, config: CollectTracesConfig, teacher_id: str) -> Answer:
    """ValueError naming the teacher and the prompt, with what is wrong, if the answer cannot be a trace."""
    try:
        return _answer(said, prompt, tokenizer, config, teacher_id)
    except ValueError as error:
        raise ValueError(f"teacher {teacher_id!r}, prompt {prompt.prompt_id!r}: {error}") from error
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(
            f"teacher {teacher_id!r}, prompt {prompt.prompt_id!r}: the server's answer is not of the form of the "
            f"{config.server_api} API ({type(error).__name__}: {error})"
        ) from error


def _answer(said: Any, prompt: Prompt, tokenizer: Any, config: CollectTracesConfig, teacher_id: str) -> Answer:
    choice = said["choices"][0]
    _require_our_prompt(said, choice, prompt, config)
    if not choice.get("logprobs"):
        raise ValueError("the server gives no log-probabilities")
    steps = _steps(choice["logprobs"])
    ids = [token_id for token_id, _ in steps]
    _require_our_ids(ids, choice, tokenizer, config)
    sparse = _sparse([top for _, top in steps], config.top_k, len(tokenizer))
    return Answer(
        prompt=prompt,
        teacher_id=teacher_id,
        response_token_ids=ids,
        stop_reason=_stop_reason(choice["finish_reason"], ids[-1], tokenizer.eos_token_id),
        sparse=sparse,
        key_token_score_T=_key_token_score(sparse, config),
    )


def _require_our_prompt(said: Any, choice: Any, prompt: Prompt, config: CollectTracesConfig) -> None:
    seen = choice.get("prompt_token_ids") or said.get("prompt_token_ids")
    if seen is not None:
        if seen != prompt.token_ids:
            at = next((i for i, (a, b) in enumerate(zip(seen, prompt.token_ids, strict=False)) if a != b), None)
            where = f"they differ from token {at} on" if at is not None else "one begins with the other"
            raise ValueError(
                f"the server saw a prompt of {len(seen)} tokens, ours has {len(prompt.token_ids)} and {where}; its "
                "tokenizer and chat template must be those of collect_traces.teacher"
            )
    elif config.server_api == "chat":
        raise ValueError(
            "the server does not say which tokens its chat template made of the prompt; use "
            "collect_traces.server_api completions, which sends the tokens, or a server with return_token_ids"
        )
    elif said["usage"]["prompt_tokens"] != len(prompt.token_ids):
        raise ValueError(
            f"the server saw {said['usage']['prompt_tokens']} of the prompt's {len(prompt.token_ids)} tokens"
        )


def _require_our_ids(ids: list[int], choice: Any, tokenizer: Any, config: CollectTracesConfig) -> None:
    if not ids:
        raise ValueError("the answer has no tokens")
    if len(ids) > config.max_new_tokens:
        raise ValueError(f"the answer has {len(ids)} tokens, collect_traces.max_new_tokens is {config.max_new_tokens}")
    if (told := choice.get("token_ids")) is not None and told != ids:
        raise ValueError(f"token_ids of the answer are not the tokens of its log-probabilities: {told[:8]}, {ids[:8]}")
    if beyond := [token_id for token_id in ids if not 0 <= token_id < len(tokenizer)]:
        raise ValueError(f"token {beyond[0]} is not among the {len(tokenizer)} of our tokenizer")
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    ours = tokenizer.decode(ids, skip_special_tokens=True)
    if _comparable(text) != _comparable(ours):
        raise ValueError(
            f"the answer's tokens are {ours[:60]!r} to our tokenizer and {text[:60]!r} to the server; both must have "
            "the tokenizer of collect_traces.teacher"
        )


def _comparable(text: str | None) -> str:
    """Servers decode token by token: they differ in a first space and in how they show broken characters."""
    return (text or "").replace("\ufffd", "").strip()


def _steps(logprobs: Any) -> list[Step]:
    """From either form: parallel lists with a dict per token, or a list of tokens with their alternatives."""
    if logprobs.get("content") is not None:
        return [
            (_id(entry), [(_id(other), other["logprob"]) for other in entry["top_logprobs"]])
            for entry in logprobs["content"]
        ]
    return [
        (_id({"token": token}), [(_id({"token": other}), logprob) for other, logprob in top.items()])
        for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
    ]


def _id(entry: dict[str, Any]) -> int:
    if isinstance(entry.get("id"), int):
        return entry["id"]
    text = entry["token"]
    if not text.startswith(_ID) or not text[len(_ID) :].isdecimal():
        raise ValueError(
            f"the server names a token by its text, {text!r}, which is not unique; ids are needed, as vLLM gives them "
            "for return_tokens_as_token_ids"
        )
    return int(text[len(_ID) :])


def _sparse(tops: Sequence[list[tuple[int, float]]], k: int, vocab_size: int) -> SparseTeacher:
    """The k likeliest of each step and the rest as one bucket. Servers may add the sampled token, as entry k + 1."""
    rows = [sorted(top, key=lambda entry: (-entry[1], entry[0]))[:k] for top in tops]
    fewest = min(map(len, rows))
    if fewest < k:
        raise ValueError(f"the server gives {fewest} alternatives for a token, collect_traces.top_k is {k}")
    ids = [[token_id for token_id, _ in row] for row in rows]
    if beyond := [token_id for row in ids for token_id in row if not 0 <= token_id < vocab_size]:
        raise ValueError(f"alternative {beyond[0]} is not among the {vocab_size} tokens of our tokenizer")
    ids_TK = torch.tensor(ids, dtype=torch.int32)
    logprobs_TK = torch.tensor([[logprob for _, logprob in row] for row in rows], dtype=torch.float64)
    if not logprobs_TK.min() > IMPOSSIBLE_NATS:  # NaN is refused too
        raise ValueError(f"a log-probability of {logprobs_TK.min().item()}: {AFTER_SAMPLING}")
    mass_T = logprobs_TK.exp().sum(-1)
    if mass_T.max() > MOST_MASS:
        raise ValueError(f"the {k} kept probabilities sum to {mass_T.max():.3f}, which is more than 1")
    rest_T = (1 - mass_T).clamp(min=RESOLUTION) if k < vocab_size else torch.zeros_like(mass_T)
    buckets_TB = torch.cat([logprobs_TK.exp(), rest_T[:, None]], dim=-1)
    return SparseTeacher(
        token_ids_NK=ids_TK,
        logprobs_NK=logprobs_TK.float(),
        tail_logmass_N=rest_T.log().float(),
        entropy_nats_N=torch.special.entr(buckets_TB).sum(-1).float(),
    )


def _key_token_score(sparse: SparseTeacher, config: CollectTracesConfig) -> Tensor:
    """[T]. The configuration allows only what needs no more than the likeliest token against all others, at
    temperature 1: the two as one distribution.
    """
    likeliest_T = sparse.logprobs_NK[:, 0].double()
    against_all_T2 = torch.stack([likeliest_T, torch.log(-torch.expm1(likeliest_T.clamp(max=-RESOLUTION)))], dim=-1)
    evidence = Evidence(logits_NV=against_all_T2, entropy_nats_N=sparse.entropy_nats_N)
    return key_token_score(evidence, config.key_token_strategies, config.key_token_weights)


def _stop_reason(finish_reason: str, last_id: int, eos_token_id: int) -> str:
    if finish_reason == "stop":
        return "eos" if last_id == eos_token_id else "stop"
    if finish_reason == "length":
        return "length"
    raise ValueError(f"finish_reason {finish_reason!r}: allowed are stop and length")


def require_model_probabilities(sampled: Answer, plain: Answer) -> None:
    """ValueError if the first token's log-probabilities depend on the temperature and top_p it is drawn with."""
    apart = (sampled.sparse.logprobs_NK[0] - plain.sparse.logprobs_NK[0]).abs().mean().item()
    if apart > SAME_NATS or math.isnan(apart):
        raise ValueError(
            f"log-probabilities of one token are {apart:.2f} nats apart at two temperatures: {AFTER_SAMPLING}"
        )
