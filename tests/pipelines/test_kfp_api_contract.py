"""The contract test's own server refuses what kfp-server-api does not have, or the other tests would prove nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import kfp_server_api
import pytest
import urllib3
from kfp_api_contract import Contract, operations, serving
from kfp_api_state import OPERATIONS


@pytest.fixture
def contract() -> Iterator[Contract]:
    with serving() as server:
        yield server


def ask(contract: Contract, verb: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    headers = {"Content-Type": "application/json"}
    content = json.dumps(body).encode() if body is not None else None
    answer = urllib3.request(verb, f"{contract.url}/apis/v2beta1{path}", body=content, headers=headers, retries=False)
    return answer.status, answer.json()


@pytest.mark.parametrize(
    ("verb", "path", "body", "message"),
    [
        ("GET", "/runz", None, "Not Found"),
        ("DELETE", "/experiments", None, "Not Found"),
        ("GET", "/experiments?page=2", None, "no field 'page'"),
        ("GET", "/experiments?sort_by=colour", None, "Invalid sorting field"),
        ("POST", "/experiments", {"name": "a"}, 'unknown field "name"'),
        ("POST", "/experiments", {"display_name": 3}, "invalid value for str field display_name: 3"),
        ("POST", "/recurringruns", {"mode": "ON"}, "invalid value for RecurringRunMode field mode"),
        ("POST", "/recurringruns", {"no_catchup": "true"}, "invalid value for bool field no_catchup"),
        ("POST", "/recurringruns", {"max_concurrency": "one"}, "int64 field max_concurrency"),
        ("POST", "/recurringruns", {"trigger": {"cron": "* * * * * *"}}, 'unknown field "cron"'),
        ("POST", "/recurringruns", {"created_at": "2026-01-01"}, "datetime field created_at"),
        ("POST", "/runs", {"runtime_config": {"parameters": [1]}}, "field runtime_config.parameters"),
        ("POST", "/runs", {"run_details": {"task_details": [{"state": "DONE"}]}}, "task_details[0].state"),
    ],
)
def test_what_the_api_does_not_have_is_refused(
    contract: Contract, verb: str, path: str, body: Any, message: str
) -> None:
    status, told = ask(contract, verb, path, body)
    assert status in (400, 404)
    assert message in told["message"]
    assert told["code"] == {400: 3, 404: 5}[status]


def test_every_handler_is_of_an_operation_that_the_generated_client_has() -> None:
    names = {operation.name for operation in operations()}
    assert set(OPERATIONS) <= names
    for service in ("Run", "RecurringRun", "Experiment"):
        methods = vars(getattr(kfp_server_api, f"{service}ServiceApi"))
        assert {name for name in methods if name[0] != "_" and not name.endswith("_with_http_info")} <= names


def test_wrong_answers_are_refused_too(contract: Contract) -> None:
    contract.state.experiments["1"] = {"experiment_id": 1, "created_at": "2026-01-01T00:00:00Z"}
    status, told = ask(contract, "GET", "/experiments")
    assert status == 400
    assert "experiments[0].experiment_id" in told["message"]
