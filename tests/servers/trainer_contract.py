"""A contract test of the Kubernetes API as far as it keeps TrainJobs: it takes what the CRD's schema allows, no more.

It is no Kubernetes and no Trainer: nothing runs in it, and a test says what becomes of a job. Paths, verbs, status
codes and the form of errors are those of the API's machinery for custom objects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from servers import loopback

SCHEMA = yaml.safe_load((Path(__file__).parents[1] / "data/crds/trainer.kubeflow.org.yaml").read_text())["TrainJob"]
_PATH = re.compile(r"/apis/trainer\.kubeflow\.org/v1alpha1/namespaces/([^/]+)/trainjobs(?:/([^/]+))?")


@dataclass
class Cluster:
    """The jobs, and what happens to one each time it is looked at."""

    url: str = ""
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    """Verb and name of every request."""
    on_read: Callable[[Cluster, str], None] = lambda cluster, name: None
    refuse: int = 0
    """Answer this status to everything, if it is not 0."""
    installed: bool = True

    def end(self, name: str, condition: str, reason: str = "", message: str = "") -> None:
        ended = {"type": condition, "status": "True", "reason": reason, "message": message}
        self.jobs[name]["status"] = {"conditions": [ended]}


@contextmanager
def served() -> Iterator[Cluster]:
    cluster = Cluster()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _handle(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            sent = json.loads(self.rfile.read(size)) if size else None
            match = _PATH.fullmatch(self.path.partition("?")[0])
            status, body = (404, {}) if match is None else answer(cluster, self.command, match[2] or "", sent)
            if status >= 400:
                body = {"kind": "Status", "status": "Failure", "code": status, **body}
            self._answer(status, body)

        do_GET = do_POST = do_DELETE = _handle

    with loopback.served(Handler) as cluster.url:
        yield cluster


def answer(cluster: Cluster, verb: str, name: str, sent: Any) -> tuple[int, dict[str, Any]]:
    cluster.log.append(f"{verb} {name or sent['metadata']['name']}")
    if cluster.refuse:
        return cluster.refuse, {"reason": "Refused"}
    if not cluster.installed:
        return 404, {"message": "the server could not find the requested resource"}
    if verb == "POST":
        try:
            jsonschema.validate(sent, SCHEMA)
        except jsonschema.ValidationError as error:
            return 422, {"reason": "Invalid", "message": error.message}
        name = sent["metadata"]["name"]
        if name in cluster.jobs:
            return 409, {"reason": "AlreadyExists", "message": f"trainjobs {name} already exists"}
        cluster.jobs[name] = sent
        return 201, sent
    if name in cluster.jobs and verb == "GET":
        cluster.on_read(cluster, name)
    if name not in cluster.jobs:
        return 404, {"reason": "NotFound"}
    return 200, cluster.jobs.pop(name) if verb == "DELETE" else cluster.jobs[name]
