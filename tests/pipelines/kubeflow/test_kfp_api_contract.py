"""The contract test's own server refuses what kfp-server-api does not have, or the other tests would prove nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kfp
import kfp_server_api
import pytest
import urllib3
from servers.kfp_api_contract import Contract, operations, serving
from servers.kfp_api_state import OPERATIONS
from toy_stages.pipeline import tea_party

from reflux.pipelines.compile import compile_to_text


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


def test_kfps_own_client_gets_along_with_it(contract: Contract, tmp_path: Path) -> None:
    """It is made after the API and not after our own calls: the methods that people call in notebooks work as well."""
    path = tmp_path / "pipeline.yaml"
    path.write_text(compile_to_text(tea_party(note="mild", minutes=7)))
    pipeline = contract.state.serve("pipeline_service_create_pipeline", {}, {}, {"display_name": "tea"})
    with pytest.warns(FutureWarning):
        client = kfp.Client(host=contract.url)
    experiment_id = client.create_experiment("notebook").experiment_id
    version_id = client.upload_pipeline_version(str(path), "v1", pipeline_name="tea").pipeline_version_id
    ids = {"experiment_id": experiment_id, "pipeline_id": pipeline["pipeline_id"], "version_id": version_id}
    values = {"store": "/s", "run": "r", "leaves": "assam"}
    run = client.run_pipeline(job_name="by hand", params=values, pipeline_root="s3://b/r", **ids)
    assert client.wait_for_run_completion(run.run_id, timeout=60, sleep_duration=0).state == "SUCCEEDED"
    made = client.create_recurring_run(job_name="nightly", cron_expression="0 0 1 * * *", params=values, **ids)
    client.disable_recurring_run(made.recurring_run_id)
    assert client.get_recurring_run(made.recurring_run_id).status == "DISABLED"
    assert client.list_recurring_runs(experiment_id=experiment_id).total_size == 1
    assert [each.display_name for each in client.list_runs(experiment_id=experiment_id).runs] == ["by hand"]
    with pytest.raises(kfp_server_api.ApiException, match="leafs"):
        client.run_pipeline(job_name="wrong", params={**values, "leafs": "assam"}, **ids)
