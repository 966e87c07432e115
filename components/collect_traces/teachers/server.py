"""The teacher behind an OpenAI-compatible server: token ids, top log-probabilities and nothing else of it reach us.

So there are no states and no attention, the entropy is that of the stored buckets, and who serves what under a name is
the word of the server. What can be checked is checked before the first prompt: `check_server`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from reflux.components.collect_traces.answers import Answer
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.collect_traces.prompts import Prompt
from reflux.components.collect_traces.teachers import messages
from reflux.components.collect_traces.teachers.teacher import OF_BUCKETS, Teacher
from reflux.components.collect_traces.teachers.transport import Transport
from reflux.components.declare import nearest

AHEAD = 2
"""Answers that may be under way or wait for the reader, per connection: the slowest does not keep the others idle."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where a model is served."""

    model: str
    url: str
    key: str = field(repr=False)


def configured_servers(config: CollectTracesConfig) -> list[Server]:
    """One per served teacher, in the order of `answered_by`. ValueError for a key that the environment lacks."""
    served = config.served
    urls = config.server_urls * (len(served) if len(config.server_urls) == 1 else 1)
    variables = config.server_key_variables or [""]
    variables = variables * (len(served) if len(variables) == 1 else 1)
    return [
        Server(model=model, url=url, key=_key(variable))
        for model, url, variable in zip(served, urls, variables, strict=True)
    ]


def server_teacher(server: Server, tokenizer: Any, config: CollectTracesConfig) -> Teacher:
    """The model of that name. The server is first called when the first answer is asked for."""

    def answers(prompts: Iterable[Prompt]) -> Generator[Answer, None, None]:
        waiting: deque[Future[Answer]] = deque()
        with _transport(server, config) as transport, ThreadPoolExecutor(config.server_concurrency) as pool:
            try:
                for prompt in prompts:
                    waiting.append(pool.submit(ask, transport, server, prompt, tokenizer, config))
                    if len(waiting) >= AHEAD * config.server_concurrency:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:  # after an error nobody reads the rest
                transport.cancel()
                pool.shutdown(cancel_futures=True)

    return Teacher(teacher_id=server.model, entropy_of=OF_BUCKETS, answers=answers)


def ask(transport: Transport, server: Server, prompt: Prompt, tokenizer: Any, config: CollectTracesConfig) -> Answer:
    """One prompt's answer. Errors as in `Transport.post` and `messages.read_answer`."""
    most = len(prompt.token_ids) + config.max_new_tokens
    body = messages.request(server.model, prompt, config)
    try:
        said = transport.post(messages.PATHS[config.server_api], body, tokens=most)
    except ValueError as error:
        raise ValueError(f"teacher {server.model!r}, prompt {prompt.prompt_id!r}: {error}") from error
    answer = messages.read_answer(said, prompt, tokenizer, config, server.model)
    transport.give_back(most - len(prompt.token_ids) - len(answer.response_token_ids))
    return answer


def check_server(server: Server, prompts: list[Prompt], tokenizer: Any, config: CollectTracesConfig) -> None:
    """Ask for the models, and for one token in two ways. ValueError or ConnectionError says what is not as it must be:
    the name, the context, the number of alternatives, the ids, or the temperature of the log-probabilities.
    """
    with _transport(server, config) as transport:
        _require_model(server, transport.get("/models"), prompts, config)
        probe = replace(config, max_new_tokens=1)
        shortest = min(prompts, key=lambda prompt: len(prompt.token_ids))
        sampled = ask(transport, server, shortest, tokenizer, probe)
        plain = ask(transport, server, shortest, tokenizer, replace(probe, temperature=1.0, top_p=1.0))
    try:
        messages.require_model_probabilities(sampled, plain)
    except ValueError as error:
        raise ValueError(f"teacher {server.model!r}: {error}") from error


def _require_model(server: Server, listing: Any, prompts: list[Prompt], config: CollectTracesConfig) -> None:
    try:
        models = {model["id"]: model for model in listing["data"]}
    except (KeyError, TypeError) as error:
        raise ValueError(f"server {server.url}/models: its answer is not a list of models") from error
    if server.model not in models:
        near = f"did you mean {nearest(server.model, models)}? " if models else ""
        raise ValueError(
            f"collect_traces.answered_by {server.model!r}: not served at {server.url}; {near}It serves "
            f"{', '.join(models) or 'nothing'}"
        )
    context = models[server.model].get("max_model_len")  # vLLM's own; others say nothing
    needed = max(len(prompt.token_ids) for prompt in prompts) + config.max_new_tokens
    if context is not None and needed > context:
        raise ValueError(
            f"collect_traces.max_new_tokens {config.max_new_tokens}: longest prompt and answer take {needed} tokens, "
            f"the server of {server.model!r} has room for {context}"
        )


def _transport(server: Server, config: CollectTracesConfig) -> Transport:
    return Transport(
        server.url,
        server.key,
        connections=config.server_concurrency,
        retries=config.server_retries,
        timeout_s=config.server_timeout_s,
        requests_per_minute=config.server_requests_per_minute,
        tokens_per_minute=config.server_tokens_per_minute,
    )


def _key(variable: str) -> str:
    if not variable:
        return ""
    if not os.environ.get(variable):
        raise ValueError(f"collect_traces.server_key_variables {variable!r}: the environment has no such variable")
    return os.environ[variable]
