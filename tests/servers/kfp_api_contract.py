"""A contract test of the API of Kubeflow Pipelines: a server that takes only what kfp-server-api's own models allow.

It is no Kubeflow: nothing runs in it. Paths, methods, query parameters and the types of bodies and answers are read
from the generated client of the installed version, so what it refuses is what that API does not have; what it answers
is checked in the same way. Rules that the generated code cannot know (names that exist, types of arguments, what
deleting a schedule does to its runs) are in kfp_api_state.py, read from the API server's source. Errors are
gRPC-gateway's JSON.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from email.policy import HTTP
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import kfp_server_api
from dateutil.parser import isoparse

from servers.certificates import Certificate
from servers.kfp_api_state import GRPC_CODES, DeniedError, State
from servers.loopback import answering

SERVICES = ("Experiment", "Healthz", "Pipeline", "PipelineUpload", "RecurringRun", "Run")
INT64 = {"max_concurrency", "interval_second", "execution_id"}  # "str" to the client; JSON may have a number too


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One method of the generated client: what it sends where, and what it expects back."""

    name: str
    verb: str
    path: str
    query: frozenset[str]
    body: str
    answer: str

    def match(self, path: str) -> dict[str, str] | None:
        """The parameters in a path, None if it is another's."""
        pattern = re.sub(r"\\\{([\w.\\]+)\\\}", r"([^/:]+)", re.escape(self.path))
        found = re.fullmatch(pattern, path)
        names = re.findall(r"\{([\w.]+)\}", self.path)
        return dict(zip(names, map(unquote, found.groups()), strict=True)) if found else None


@functools.cache
def operations() -> list[Operation]:
    """All of the generated client's."""
    members = [
        each for service in SERVICES for each in inspect.getmembers(getattr(kfp_server_api, f"{service}ServiceApi"))
    ]
    sources = {name: inspect.getsource(member) for name, member in members if name.endswith("_with_http_info")}
    return [_operation(name.removesuffix("_with_http_info"), source) for name, source in sources.items()]


def _operation(name: str, source: str) -> Operation:
    path, verb = re.findall(r"'(/apis/[^']+)', '([A-Z]+)'", source)[0]
    given = re.findall(r"body_params = local_var_params\['(\w+)'\]", source)
    return Operation(
        name=name,
        verb=verb,
        path=path,
        query=frozenset(re.findall(r"query_params\.append\(\('(\w+)'", source)),
        body=re.findall(rf":type {given[0]}: (\w+)", source)[0] if given else "",
        answer=re.findall(r"response_type='(\w+)'", source)[0],
    )


def check(value: Any, kind: str, place: str) -> None:
    """DeniedError, as protojson denies it, unless the value is of the generated client's type `kind`."""
    if value is None or kind == "object":
        return
    if found := re.fullmatch(r"list\[(.+)\]", kind):
        _require(isinstance(value, list), place, value, kind)
        for number, item in enumerate(value):
            check(item, found[1], f"{place}[{number}]")
    elif found := re.fullmatch(r"dict\(str, (.+)\)", kind):
        _require(isinstance(value, dict), place, value, kind)
        for name, item in value.items():
            check(item, found[1], f"{place}.{name}")
    elif kind == "datetime":
        _require(isinstance(value, str) and value.endswith("Z") and isoparse(value) is not None, place, value, kind)
    elif kind in ("str", "int", "bool"):
        number = kind == "str" and place.rpartition(".")[2] in INT64
        allowed = {"str": (str, int) if number else (str,), "int": (int,), "bool": (bool,)}[kind]
        _require(isinstance(value, allowed) and (kind == "bool") == isinstance(value, bool), place, value, kind)
        _require(not number or str(value).lstrip("-").isdecimal(), place, value, "int64")
    else:
        _check_model(value, getattr(kfp_server_api, kind), place)


def _check_model(value: Any, model: Any, place: str) -> None:
    if hasattr(model, "allowable_values"):
        _require(value in model.allowable_values, place, value, model.__name__)
        return
    _require(isinstance(value, dict), place, value, model.__name__)
    types = {model.attribute_map[name]: kind for name, kind in model.openapi_types.items()}
    for name, item in value.items():
        if name not in types:
            raise DeniedError(400, f'proto: (line 1:1): unknown field "{name}"')
        check(item, types[name], f"{place}.{name}")


def _require(holds: bool, place: str, value: Any, kind: str) -> None:
    if not holds:
        raise DeniedError(
            400, f"proto: (line 1:1): invalid value for {kind} field {place.lstrip('.')}: {json.dumps(value)}"
        )


@dataclass(kw_only=True)
class Contract:
    """What the server knows, what it was asked, and how it is to fail: `trouble` is used up before it serves again."""

    state: State
    url: str = ""
    token: str = ""
    trouble: list[tuple[int, str]] = field(default_factory=list)
    """(HTTP status, verb) for coming requests of that verb; 0 hangs up without an answer, 200 is a login page, 203 a
    proxy's own JSON."""
    asked: list[tuple[str, str, Any]] = field(default_factory=list)
    """(verb, path with query, body) of every request that was served."""

    def changes(self) -> list[tuple[str, str, Any]]:
        """The requests that were not mere reading."""
        return [each for each in self.asked if each[0] != "GET"]


@contextmanager
def serving(certificate: Certificate | None = None, **settings: Any) -> Iterator[Contract]:
    """A server on this machine's loopback, with TLS if it has a certificate; settings are State's."""
    contract = Contract(state=State(**settings))
    known = operations()
    with answering(lambda handler: _serve(handler, contract, known), _Handler, certificate) as contract.url:
        yield contract


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet, or each answer waits 40 ms for an acknowledgement

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def send(self, status: int, content: dict[str, Any]) -> None:
        self.send_text(status, "application/json", json.dumps(content))

    def send_text(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _serve(handler: _Handler, contract: Contract, known: list[Operation]) -> None:
    raw = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
    due = next((each for each in contract.trouble if each[1] == handler.command), None)
    if due is not None:
        contract.trouble.remove(due)
        if due[0] == 0:
            handler.close_connection = True
            return
        if due[0] == 200:
            handler.send_text(200, "text/html", "<html>Who are you?</html>")
            return
        if due[0] == 203:
            handler.send(203, {"page": "Who are you?"})
            return
        handler.send(due[0], {"code": GRPC_CODES.get(due[0], 13), "message": "trouble on demand", "details": []})
        return
    try:
        if contract.token and handler.headers.get("authorization") != f"Bearer {contract.token}":
            raise DeniedError(401, "Request header error: there is no user identity header.")
        handler.send(200, _answer(handler, contract, known, raw))
    except DeniedError as denied:
        code = GRPC_CODES.get(denied.status, 13)
        handler.send(denied.status, {"code": code, "message": str(denied), "details": [{"@type": "error"}]})


def _answer(handler: _Handler, contract: Contract, known: list[Operation], raw: bytes) -> dict[str, Any]:
    address = urlsplit(handler.path)
    matching = [(each, each.match(address.path)) for each in known if each.verb == handler.command]
    operation, ids = next(((each, found) for each, found in matching if found is not None), (None, None))
    if operation is None or ids is None:
        raise DeniedError(404, "Not Found")
    query = dict(parse_qsl(address.query, keep_blank_values=True))
    for name in query.keys() - operation.query:
        raise DeniedError(400, f"no field {name!r} found in the request of {operation.name}")
    body = _body(handler, operation, raw)
    contract.asked.append((handler.command, handler.path, body))
    told = contract.state.serve(operation.name, ids, query, body)
    check(told, operation.answer, "")  # what is answered is of the API's types too
    return told


def _body(handler: _Handler, operation: Operation, raw: bytes) -> Any:
    kind = handler.headers.get("Content-Type", "")
    if operation.name.startswith("upload_pipeline"):
        message = message_from_bytes(f"Content-Type: {kind}\r\n\r\n".encode() + raw, policy=HTTP)
        parts = {part.get_param("name", header="content-disposition"): part for part in message.iter_parts()}  # type: ignore[attr-defined]
        if set(parts) != {"uploadfile"}:
            raise DeniedError(400, "Failed to read pipeline from file")
        return parts["uploadfile"].get_payload(decode=True).decode()
    if not operation.body:
        return None
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise DeniedError(400, f"proto: syntax error (line 1:1): {error}") from None
    check(body, operation.body, "")
    return body
