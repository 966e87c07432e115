"""A proxy in front of a real S3 server for what a healthy server cannot be made to show.

It forwards real traffic and misbehaves where it is told to: it breaks a connection after some bytes, keeps silent,
answers with an error of its own, loses the server's answer after the work was done, or refuses everybody for a while.
Each connection carries one request, so that a fault hits exactly the request that it was meant for.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from reflux.components.storage import S3Settings

_ALL = 1 << 60
_PIECE = 65_536


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one request."""

    upload_bytes: int = _ALL
    """The connection breaks after so many bytes of the request's body."""
    download_bytes: int = _ALL
    """The connection breaks after so many bytes of the answer, its head included; 0: the work is done, nobody hears."""
    silent_s: float = 0.0
    """The proxy waits so long before it forwards anything."""
    status: int = 0
    """It answers this itself, with `code` as S3 would say it."""
    code: str = ""
    before: Callable[[], object] = lambda: None
    """Done before the request is forwarded: what somebody else does to the store in that moment."""


@dataclass(kw_only=True)
class Request:
    """A request that came by."""

    method: str
    target: str
    headers: dict[str, str] = field(default_factory=dict)
    up_bytes: int = 0
    """Of its body, forwarded."""
    down_bytes: int = 0
    """Of the answer, forwarded."""


@dataclass(kw_only=True)
class Proxy:
    """A running proxy: where it listens, what came by, and what is to go wrong."""

    settings: S3Settings
    seen: list[Request] = field(default_factory=list)
    faults: list[tuple[str, str, Fault]] = field(default_factory=list)
    away_until: float = 0.0

    def next(self, method: str, part: str, *faults: Fault) -> None:
        """The next requests with this method and this text in their path or query suffer these faults, one each."""
        self.faults += [(method, part, fault) for fault in faults]

    def go_away(self, seconds: float) -> None:
        """Break off every connection, those under way too, until the time is over."""
        self.away_until = time.monotonic() + seconds

    def away(self) -> bool:
        return time.monotonic() < self.away_until

    def count(self, method: str, part: str = "") -> int:
        return sum(request.method == method and part in request.target for request in self.seen)

    def take(self, method: str, target: str) -> Fault:
        for n, (wanted, part, fault) in enumerate(self.faults):
            if wanted == method and part in target:
                del self.faults[n]
                return fault
        return Fault()


@contextmanager
def in_front_of(server: S3Settings, *, patience_s: float = 10.0) -> Iterator[Proxy]:
    """A proxy on a free port. Its settings are the server's, with its own endpoint and the given patience."""
    parts = urlsplit(str(server.endpoint))
    assert parts.hostname is not None
    assert parts.port is not None
    target = (parts.hostname, parts.port)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        proxy = Proxy(settings=replace(server, endpoint=endpoint, patience_s=patience_s))
        lock = threading.Lock()

        def serve() -> None:
            with suppress(OSError):  # the listener was closed: the test is over
                while True:
                    client = listener.accept()[0]
                    threading.Thread(target=_handle, args=(proxy, lock, client, target), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield proxy
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def _handle(proxy: Proxy, lock: threading.Lock, client: socket.socket, target: tuple[str, int]) -> None:
    with client, suppress(OSError):
        if proxy.away():
            _break(client)
            return
        head, rest = _read_head(client)
        if not head:
            return
        first, *lines = head.decode().split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        request = Request(method=method, target=path, headers=headers)
        with lock:
            fault = proxy.take(method, path)
            proxy.seen.append(request)
        fault.before()
        time.sleep(fault.silent_s)
        if fault.status:
            _answer(client, request, len(rest), fault)
            return
        with socket.create_connection(target) as server:
            server.sendall(head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1) + rest)
            request.up_bytes = len(rest)
            if not _relay(proxy, request, fault, client, server):
                _break(client)


def _read_head(client: socket.socket) -> tuple[bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = client.recv(_PIECE)
        if not piece:
            return b"", b""
        data += piece
    head, _, rest = data.partition(b"\r\n\r\n")
    return head + b"\r\n\r\n", rest


def _relay(proxy: Proxy, request: Request, fault: Fault, client: socket.socket, server: socket.socket) -> bool:
    """Forward in both directions until the answer is complete; False as soon as the connection is to be broken."""
    while not proxy.away() and request.up_bytes < fault.upload_bytes:
        readable = select.select([client, server], [], [], 0.05)[0]
        if client in readable:
            if not (data := client.recv(_PIECE)):
                return True
            data = data[: fault.upload_bytes - request.up_bytes]
            request.up_bytes += len(data)
            server.sendall(data)
        if server in readable:
            if not (data := server.recv(_PIECE)):
                return True
            if data.startswith(b"HTTP/1.1 100"):
                client.sendall(data)
            elif data := data[: fault.download_bytes - request.down_bytes]:
                request.down_bytes += len(data)
                client.sendall(data)
            else:
                return False
    return False


def _answer(client: socket.socket, request: Request, had_bytes: int, fault: Fault) -> None:
    """S3's own form of an error. The body is read first: a client that is still sending would not read the answer."""
    if request.headers.get("expect") == "100-continue":
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    left = int(request.headers.get("content-length", 0)) - had_bytes
    while left > 0 and (data := client.recv(min(_PIECE, left))):
        left -= len(data)
    error = f"<Error><Code>{fault.code}</Code><Message>no</Message></Error>".encode()
    body = b"" if request.method == "HEAD" else error
    lines = f"HTTP/1.1 {fault.status} No\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    client.sendall(lines.encode() + body)


def _break(connection: socket.socket) -> None:
    """End it with a reset, as a machine that goes down does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
