"""Requests to one server that may be slow, busy or away for a moment: paced, repeated with growing pauses, cancelled
together. What the answers mean is not known here.

The key travels in a header and stands in no message.
"""

from __future__ import annotations

import random
import threading
import time
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any

import httpx2

from reflux.components.collect_traces.teachers.pace import Pace

REPEATED = {408, 425, 429, 500, 502, 503, 504, 529}
"""Statuses that may be another one next time."""
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 30.0
PATIENCE_S = 600.0
"""A server that says to come back later than this is not waited for."""
CONNECT_S = 10.0
EXCERPT = 300


class CancelledError(Exception):
    """Another request has failed for good, so this one is not made any more."""


class Transport:
    """A connection pool to the server at `url`; its methods may be called from any thread."""

    def __init__(
        self, url: str, key: str = "", *, connections: int = 1, retries: int = 0, timeout_s: float = 60.0,
        requests_per_minute: float = 0.0, tokens_per_minute: float = 0.0,
    ) -> None:  # fmt: skip
        self.url = url.rstrip("/")
        self._retries = retries
        self._client = httpx2.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(timeout_s, connect=CONNECT_S, pool=None),
            limits=httpx2.Limits(max_connections=connections),
        )
        self._requests, self._tokens = Pace(requests_per_minute), Pace(tokens_per_minute)
        self._cancelled = threading.Event()

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._client.close()

    def cancel(self) -> None:
        """No request is begun or repeated any more; those that wait raise `CancelledError`."""
        self._cancelled.set()

    def get(self, path: str) -> Any:
        """The JSON at `path`. Errors as in `post`."""
        return self._repeated("GET", path, None, tokens=0)

    def post(self, path: str, body: dict[str, Any], *, tokens: int) -> Any:
        """The JSON that answers `body`; `tokens` is the most that it can cost, for the limit on tokens.

        ConnectionError if the server is still busy or away after all repetitions; ValueError with what it says if it
        refuses the request.
        """
        return self._repeated("POST", path, body, tokens=tokens)

    def give_back(self, tokens: int) -> None:
        """Tokens that an answered request did not use."""
        self._tokens.give_back(tokens)

    def _repeated(self, method: str, path: str, body: dict[str, Any] | None, *, tokens: int) -> Any:
        place = f"server {self.url}{path}"
        for attempt in range(self._retries + 1):
            self._pause(max(self._requests.take(), self._tokens.take(tokens)))
            try:
                response = self._client.request(method, self.url + path, json=body)
            except httpx2.TransportError as error:
                cause, asked_s = f"{type(error).__name__}: {error}", 0.0
            else:
                if response.status_code not in REPEATED:
                    return _content(place, response)
                cause, asked_s = f"HTTP {response.status_code}: {_excerpt(response)}", _retry_after_s(response)
            self._tokens.give_back(tokens)
            if asked_s > PATIENCE_S:
                raise ConnectionError(f"{place}: asks to come back in {asked_s:.0f} s ({cause})")
            if attempt < self._retries:  # at random, so that those who failed together do not come back together
                growing_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt)
                self._pause(max(asked_s, random.uniform(growing_s / 2, growing_s)))
        raise ConnectionError(f"{place}: no answer after {self._retries + 1} attempts, the last ended in {cause}")

    def _pause(self, seconds: float) -> None:
        if self._cancelled.wait(seconds):
            raise CancelledError


def _content(place: str, response: httpx2.Response) -> Any:
    if not response.is_success:
        raise ValueError(f"{place}: refuses the request, HTTP {response.status_code}: {_excerpt(response)}")
    try:
        return response.json()
    except ValueError:
        raise ValueError(f"{place}: its answer is not JSON: {_excerpt(response)}") from None


def _excerpt(response: httpx2.Response) -> str:
    """What the server says, with OpenAI's wrapping taken off where it is there."""
    try:
        text = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = response.text
    text = " ".join(text.split())
    return text if len(text) <= EXCERPT else f"{text[:EXCERPT]}..."


def _retry_after_s(response: httpx2.Response) -> float:
    """Retry-After in seconds, from a number or a date; 0 where there is none."""
    value = response.headers.get("Retry-After", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0
