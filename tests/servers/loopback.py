"""A server of the tests on this machine's loopback, for as long as a block: a thread, a free port, TLS if asked."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from servers.certificates import Certificate


@contextmanager
def answering(
    answer: Callable[[Any], None], base: type[BaseHTTPRequestHandler], certificate: Certificate | None = None
) -> Iterator[str]:
    """The server's URL. `answer` gets the handler, a `base`, of each request, whatever its method."""
    methods = {f"do_{name}": answer for name in ("GET", "HEAD", "POST", "PATCH", "DELETE")}
    with served(type("Handler", (base,), methods), certificate) as url:
        yield url


@contextmanager
def served(handler: Callable[..., BaseHTTPRequestHandler], certificate: Certificate | None = None) -> Iterator[str]:
    """The URL of a server that makes one `handler` for each connection."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate.public, certificate.private)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"{'https' if certificate else 'http'}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
