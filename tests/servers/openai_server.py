"""A small server that speaks the OpenAI API over real sockets, with vLLM's extensions, in front of a real model.

It runs the model of a folder and answers /v1/models, /v1/completions and /v1/chat/completions. What a busy, broken or
differently configured server does, it does where it is told to: `Fault`s hit the next requests, one each.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reflux.components.algorithms.draws import Sampling
from reflux.components.algorithms.rollouts import Request, rollout
from reflux.components.models import chat_token_ids, load_model, load_tokenizer
from servers.loopback import served


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one request for an answer."""

    status: int = 0
    """The server answers this at once, without asking the model."""
    headers: dict[str, str] = field(default_factory=dict)
    body: str = '{"error": {"message": "told to fail"}}'
    cut_after: int = -1
    """The connection breaks after so many bytes of the answer's body; 0: after the head."""
    delay_s: float = 0.0
    """It waits so long before the answer."""


@dataclass(kw_only=True)
class OpenAIServer:
    """A running server: where it is, how it is configured, what it was asked."""

    model_name: str
    url: str = ""
    key: str = ""
    """Every request must carry this, if it is not empty."""
    max_logprobs: int = 20
    max_model_len: int = 512
    after_sampling: bool = False
    """Log-probabilities are those after temperature, as with vLLM's processed_logprobs."""
    ids: bool = True
    """Tokens are named by id where the request asks for it."""
    shifted_ids: int = 0
    """Added to the ids of answers, as a server with another tokenizer would."""
    prompt_prefix: list[int] = field(default_factory=list)
    """Put before every prompt, as a server does that adds a BOS."""
    faults: deque[Fault] = field(default_factory=deque)
    always: Fault | None = None
    """Happens to every request that no other fault hits."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Requests for answers, in the order of arrival, repetitions too."""
    started_s: list[float] = field(default_factory=list)
    """When they arrived."""
    most_at_once: int = 0
    _under_way: int = 0
    _lock: Any = field(default_factory=threading.Lock)


@contextmanager
def running(folder: Path, model_name: str = "tiny", **configured: Any) -> Iterator[OpenAIServer]:
    """Serve the model of a folder on a free port of this machine."""
    state = OpenAIServer(model_name=model_name, **configured)
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    handler = type("Handler", (_Handler,), {"state": state, "model": model, "tokenizer": tokenizer})
    with served(handler) as url:
        state.url = f"{url}/v1"
        yield state


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: OpenAIServer
    model: Any
    tokenizer: Any

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if not self._let_in():
            return
        if self.path != "/v1/models":
            return self._send(404, {"error": {"message": f"no {self.path}"}})
        model = {"id": self.state.model_name, "object": "model", "max_model_len": self.state.max_model_len}
        self._send(200, {"object": "list", "data": [model]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._let_in():
            return
        state = self.state
        with state._lock:
            state.bodies.append(body)
            state.started_s.append(time.monotonic())
            state._under_way += 1
            state.most_at_once = max(state.most_at_once, state._under_way)
            fault = state.faults.popleft() if state.faults else state.always or Fault()
        try:
            time.sleep(fault.delay_s)
            if fault.status:
                self._send(fault.status, fault.body, fault.headers)
            else:
                self._send(*self._answer(body), cut_after=fault.cut_after)
        finally:
            with state._lock:
                state._under_way -= 1

    def _let_in(self) -> bool:
        if self.state.key and self.headers.get("Authorization") != f"Bearer {self.state.key}":
            self._send(401, {"error": {"message": "the key is wrong"}})
            return False
        return True

    def _answer(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        chat = self.path == "/v1/chat/completions"
        k = body["top_logprobs"] if chat else body["logprobs"]
        if k > self.state.max_logprobs:
            message = f"Requested sample logprobs of {k}, which is greater than max allowed: {self.state.max_logprobs}"
            return 400, {"error": {"message": message}}
        prompt = chat_token_ids(self.tokenizer, body["messages"][0]["content"]) if chat else body["prompt"]
        prompt = [*self.state.prompt_prefix, *prompt]
        sampling = Sampling(temperature=body["temperature"], top_p=body["top_p"], max_new_tokens=body["max_tokens"])
        steps: list[Tensor] = []
        with self.state._lock:  # one answer at a time: the model's caches are not made for threads
            (done,) = rollout(
                self.model,
                [Request(prompt_token_ids=prompt, seed=body["seed"])],
                sampling,
                eos_token_id=self.tokenizer.eos_token_id,
                vocab_size=len(self.tokenizer),
                on_step=lambda rows, logits_BV: steps.append(logits_BV[0].clone()),
            )
        ids = done.response_token_ids
        heat = body["temperature"] if self.state.after_sampling and body["temperature"] else 1.0
        tops = [self._top(logits_V / heat, token_id, k) for logits_V, token_id in zip(steps, ids, strict=True)]
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": {"eos": "stop", "length": "length"}[done.stop_reason],
            "token_ids": [token_id + self.state.shifted_ids for token_id in ids],
        }
        said: dict[str, Any] = {
            "choices": [choice],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)},
        }
        if chat:
            choice["message"] = {"role": "assistant", "content": text}
            choice["logprobs"] = {"content": [
                {"token": self._name(token_id), "logprob": top[token_id], "top_logprobs": [
                    {"token": self._name(other), "logprob": logprob} for other, logprob in top.items()]}
                for token_id, top in zip(ids, tops, strict=True)
            ]}  # fmt: skip
            said["prompt_token_ids"] = prompt
        else:
            choice["text"] = text
            choice["prompt_token_ids"] = prompt
            choice["logprobs"] = {
                "tokens": [self._name(token_id) for token_id in ids],
                "token_logprobs": [top[token_id] for token_id, top in zip(ids, tops, strict=True)],
                "top_logprobs": [{self._name(other): logprob for other, logprob in top.items()} for top in tops],
            }
        return 200, said

    def _top(self, logits_V: Tensor, sampled_id: int, k: int) -> dict[int, float]:
        """The sampled token and the k likeliest: k or k + 1 entries, the sampled one first, as vLLM has it."""
        logprobs_V = torch.log_softmax(logits_V, dim=-1)
        chosen = dict.fromkeys([sampled_id, *logprobs_V.topk(k).indices.tolist()])
        return {token_id: logprobs_V[token_id].item() for token_id in chosen}

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id + self.state.shifted_ids}" if self.state.ids else self.tokenizer.decode([token_id])

    def _send(self, status: int, content: Any, headers: dict[str, str] | None = None, *, cut_after: int = -1) -> None:
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.close_connection |= cut_after >= 0
        with suppress(ConnectionError):  # whoever asked has stopped waiting
            self.end_headers()
            self.wfile.write(data if cut_after < 0 else data[:cut_after])
