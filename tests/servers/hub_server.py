"""A small server that speaks as much of the Hugging Face hub's API as its library asks for when it fetches a model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from servers.loopback import answering

COMMIT = "c0ffee" * 6 + "c0ff"


@dataclass(kw_only=True)
class Hub:
    """One model, whose files lie in a folder."""

    name: str
    folder: Path
    url: str = ""
    sent: dict[str, int] = field(default_factory=dict)
    """File -> bytes of it that were sent."""

    def files(self) -> dict[str, Path]:
        return {
            path.relative_to(self.folder).as_posix(): path for path in sorted(self.folder.rglob("*")) if path.is_file()
        }


@contextmanager
def serving(name: str, folder: Path) -> Iterator[Hub]:
    """On this machine's loopback; HF_ENDPOINT is where the library looks for it."""
    hub = Hub(name=name, folder=folder)

    with answering(lambda handler: _answer(handler, hub), _Handler) as hub.url:
        yield hub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def send(self, status: int, body: bytes, length: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _answer(handler: _Handler, hub: Hub) -> None:
    path = unquote(urlsplit(handler.path).path)
    if path in (f"/api/models/{hub.name}", *(f"/api/models/{hub.name}/revision/{each}" for each in ("main", COMMIT))):
        siblings = [{"rfilename": name, "size": file.stat().st_size} for name, file in hub.files().items()]
        told: Any = {"id": hub.name, "sha": COMMIT, "siblings": siblings}
        handler.send(200, json.dumps(told).encode(), Content_Type="application/json")
    elif path.startswith(f"/api/models/{hub.name}/tree/{COMMIT}"):
        told = [
            {"type": "file", "path": name, "size": file.stat().st_size, "oid": _sha1(file)}
            for name, file in hub.files().items()
        ]
        handler.send(200, json.dumps(told).encode(), Content_Type="application/json")
    elif path.startswith(f"/{hub.name}/resolve/") and (file := hub.files().get(path.split("/", 5)[5])):
        _send_file(handler, hub, file)
    else:
        handler.send(404, b"{}", X_Error_Code="RepoNotFound", Content_Type="application/json")


def _send_file(handler: _Handler, hub: Hub, file: Path) -> None:
    data = file.read_bytes()
    known = {"ETag": f'"{_sha1(file)}"', "X_Repo_Commit": COMMIT, "Accept_Ranges": "bytes"}
    asked = handler.headers.get("Range")
    if asked and handler.command == "GET":
        first, _, last = asked.removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last) + 1 if last else None]
        hub.sent[file.name] = hub.sent.get(file.name, 0) + len(part)
        end = int(first) + len(part) - 1
        handler.send(206, part, Content_Range=f"bytes {first}-{end}/{len(data)}", **known)
        return
    if handler.command == "GET":
        hub.sent[file.name] = hub.sent.get(file.name, 0) + len(data)
    handler.send(200, data, **known)


def _sha1(file: Path) -> str:
    return hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest()
