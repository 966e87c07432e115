"""The API of Kubeflow Pipelines through kfp's client: where, as whom, what its errors mean, all pages of a list.

kfp.Client asks a server that refuses it five times with pauses between, and logs a traceback each time; here it asks
once, and what is wrong becomes one line. Requests go through the generated methods that the client carries
(`client.runs`, …), because the methods above them have no time limit, print to the terminal, and cannot schedule a
pipeline without pinning its version.
"""

from __future__ import annotations

import json
import logging
import os
import ssl
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import kfp
import kfp_server_api
from kfp.client.token_credentials_base import TokenCredentialsBase
from urllib3.exceptions import HTTPError

HOST_VARIABLE = "KF_PIPELINES_ENDPOINT"
"""kfp's own name for the variable; its others, for tokens and Google's proxy, are read by kfp itself."""

TIMEOUT_S = 30
PAGE_SIZE = 100
_IN_CLUSTER = "KUBERNETES_SERVICE_HOST"  # Kubernetes sets it in every container
_NOT_THE_API = (
    "answers, but not as the API of Kubeflow Pipelines; where a login page stands before it, give --token-file or a "
    "cookie in kfp's context file, or renew it"
)
_EXAMPLES = "e.g. --host https://kubeflow.example/pipeline, or http://localhost:8080 behind kubectl port-forward"


class RefusedError(ValueError):
    """The API said no. `status` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class OutOfReachError(ConnectionError):
    """No answer, or one that says to try again later."""


@dataclass(frozen=True, kw_only=True)
class Connection:
    """Where the API is and who asks; "" and None leave it to kfp's environment variables and configuration."""

    host: str = ""
    namespace: str = ""
    token_file: Path | None = None
    ca_cert: Path | None = None
    kube_context: str = ""


@dataclass(frozen=True, kw_only=True)
class Api:
    """A client that has reached its server. `namespace` is "" on an installation for one user.

    With `dry_run` everything is read and nothing is changed: `change` prints what it would send.
    """

    client: Any
    host: str
    namespace: str
    dry_run: bool = False


def connect(connection: Connection, *, dry_run: bool = False) -> Api:
    """Reach the server. ValueError for a wrong setting or a refusal, OutOfReachError when nothing answers."""
    host = connection.host or os.environ.get(HOST_VARIABLE, "")
    if not host and not connection.kube_context and _IN_CLUSTER not in os.environ:
        raise ValueError(f"--host: missing, and {HOST_VARIABLE} is not set; {_EXAMPLES}")
    if "@" in host.partition("//")[2].partition("/")[0]:
        raise ValueError("--host: names a user, whom kfp's client would not send; give --token-file")
    if host and not host.startswith(("http://", "https://")):
        raise ValueError(f"--host {host}: must begin with http:// or https://; {_EXAMPLES}")
    _check_files(connection)
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # it warns of every retry by itself
    shown = host or "the API of this cluster"
    with warnings.catch_warnings(), answering(shown):
        warnings.simplefilter("ignore", FutureWarning)  # kfp's of servers before 2.0
        client = _Client(
            host=host or None,
            credentials=_TokenFile(connection.token_file) if connection.token_file else None,
            ssl_ca_cert=str(connection.ca_cert) if connection.ca_cert else None,
            kube_context=connection.kube_context or None,
        )
        health = client.get_kfp_healthz()
    namespace = connection.namespace or client.get_user_namespace()
    if health.multi_user and not namespace:
        raise ValueError(f"--namespace: missing; {shown} serves many users, each in a namespace")
    return Api(client=client, host=shown, namespace=namespace if health.multi_user else "", dry_run=dry_run)


def call(api: Api, method: Callable[..., Any], **arguments: Any) -> Any:
    """Ask once, with a time limit. RefusedError for what the API will not do, OutOfReachError without an answer."""
    with answering(api.host):
        answer = method(**arguments, _request_timeout=TIMEOUT_S)
    _require_json(api.host, method)
    return answer


def change(api: Api, what: str, method: Callable[..., Any], **arguments: Any) -> Any:
    """Send a request that changes something, and say what it is; in a dry run show all that it would say, and None."""
    if api.dry_run:
        body = kfp_server_api.ApiClient().sanitize_for_serialization(arguments)
        click.echo(f"would {what}: {json.dumps(body, ensure_ascii=False)}")
        return None
    answer = one(api, method, **arguments)
    click.echo(what)
    return answer


def one(api: Api, method: Callable[..., Any], **arguments: Any) -> Any:
    """`call` for a single object. One without any content comes from a proxy, whose JSON has none of the fields."""
    answer = call(api, method, **arguments)
    if hasattr(answer, "to_dict") and not any(answer.to_dict().values()):
        raise OutOfReachError(f"{api.host}: {_NOT_THE_API}")
    return answer


def every(api: Api, method: Callable[..., Any], field: str, **arguments: Any) -> Iterator[Any]:
    """The items of all pages; `field` is the name of the list in the answer."""
    token = ""
    while True:
        page = call(api, method, page_token=token, page_size=PAGE_SIZE, **arguments)
        yield from getattr(page, field) or []
        token = page.next_page_token
        if not token:
            return


def equals(key: str, value: str) -> str:
    """The API's filter for one field."""
    return json.dumps({"predicates": [{"operation": "EQUALS", "key": key, "stringValue": value}]})


def in_namespace(api: Api) -> dict[str, str]:
    """The argument of lists on an installation for many users."""
    return {"namespace": api.namespace} if api.namespace else {}


@contextmanager
def answering(host: str) -> Iterator[None]:
    """Turn what kfp's client raises into one line that says what to do."""
    try:
        yield
    except kfp_server_api.ApiException as error:
        if error.status and error.status < 500 and error.status != 429:
            raise RefusedError(_refusal(host, error), error.status) from error
        said = _message(error) or error.reason
        raise OutOfReachError(f"{host}: does not answer as it should ({error.status}: {said})") from error
    except UnicodeDecodeError as error:
        raise OutOfReachError(f"{host}: {_NOT_THE_API}") from error
    except HTTPError as error:  # urllib3's: no connection, no answer in time, no trust in the certificate
        cause = getattr(error, "reason", None) or error
        advice = "; --ca-cert FILE names the authority to trust" if _untrusted(cause) else ""
        raise OutOfReachError(f"{host}: cannot be reached ({_line(cause)}){advice}") from error


class _Client(kfp.Client):
    """kfp's client, except that it asks for the server's state once, not five times, and writes no file.

    It is given no namespace: kfp would take the user's for the one that the API's service is in, too.
    """

    def set_user_namespace(self, namespace: str) -> None:
        """What kfp calls in a pod, with the pod's own."""
        self._context_setting["namespace"] = namespace

    def get_kfp_healthz(self, sleep_duration: int = 0) -> Any:
        """The server's state. ValueError if what answers is not the API."""
        host = self._existing_config.host
        try:
            answer = self.healthzs.healthz_service_get_healthz(_preload_content=False, _request_timeout=TIMEOUT_S)
            state = json.loads(answer.data)
        except kfp_server_api.ApiException as error:
            if error.status != 404:
                raise
            raise ValueError(f"{host}: there is no API of Kubeflow Pipelines 2 here (404); {_EXAMPLES}") from error
        except ValueError:
            state = None
        if not isinstance(state, dict):
            raise ValueError(f"{host}: {_NOT_THE_API}")
        return kfp_server_api.V2beta1GetHealthzResponse(multi_user=state.get("multi_user"))


class _TokenFile(TokenCredentialsBase):
    """A bearer token that is read anew for every request, because what writes such files renews them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def refresh_api_key_hook(self, config: Any) -> None:
        config.api_key["authorization"] = self.path.read_text(encoding="utf-8").strip()


def _require_json(host: str, method: Any) -> None:
    """OutOfReachError for a login page, which kfp's client reads as an object or a list without anything in it."""
    try:
        told = json.loads(method.__self__.api_client.last_response.data)
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise OutOfReachError(f"{host}: {_NOT_THE_API}")


def _check_files(connection: Connection) -> None:
    if connection.token_file is not None:
        try:
            token = connection.token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--token-file {connection.token_file}: cannot be read ({error})") from None
        if not token:
            raise ValueError(f"--token-file {connection.token_file}: is empty")
    if connection.ca_cert is not None:
        try:
            ssl.create_default_context(cafile=str(connection.ca_cert))
        except (ssl.SSLError, OSError) as error:
            raise ValueError(f"--ca-cert {connection.ca_cert}: no certificates in PEM form ({error})") from None


def _refusal(host: str, error: Any) -> str:
    said = _message(error)
    if error.status == 401:
        return f"{host}: does not know who you are (401{_after(said)}); give --token-file, or renew what is in it"
    if error.status == 403:
        return f"{host}: you are not allowed to do this (403{_after(said)}); is --namespace yours?"
    return f"{host}: refused ({error.status}{_after(said)})"


def _message(error: Any) -> str:
    """What the server says in its JSON, "" for anything else, such as a proxy's page."""
    try:
        content = json.loads(error.body)
        return _line(content.get("message") or content.get("error_message") or content.get("error") or "")
    except (TypeError, ValueError, AttributeError):
        return ""


def _after(said: str) -> str:
    return f": {said}" if said else ""


def _untrusted(cause: Any) -> bool:
    return "CERTIFICATE_VERIFY_FAILED" in str(cause)


def _line(text: Any) -> str:
    return " ".join(str(text).split())[:500]
