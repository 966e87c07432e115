"""Watching a run on a cluster: what is shown, what the exit code says, and what an outage, Ctrl-C and MLflow change."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
import urllib3
from click.testing import CliRunner, Result
from servers.kfp_api_contract import Contract, serving
from servers.loopback import served
from toy_stages.pipeline import tea_party

from reflux.pipelines.__main__ import cli
from reflux.pipelines.compile import compile_to_text
from reflux.pipelines.kubeflow import kfp_api, submit, verdict, watch
from reflux.pipelines.kubeflow.package import Package, tasks

FAILS = [
    {"run": "RUNNING", "brew": "RUNNING"},
    {"run": "RUNNING", "brew": "FAILED"},
    {"run": "FAILED", "brew": "FAILED", "pour": "SKIPPED"},
]


@pytest.fixture(scope="module")
def package() -> Package:
    return Package(text=compile_to_text(tea_party(note="mild", minutes=7)))


@pytest.fixture
def contract() -> Iterator[Contract]:
    with serving() as server:
        yield server


@pytest.fixture
def run_id(contract: Contract, package: Package) -> str:
    asked = submit.asked(
        package, recipe="tea", config=None, name="tea-1", pipeline="", experiment="reflux", pipeline_root="",
        service_account="", texts=["store=/s", "leaves=assam"],
    )  # fmt: skip
    return submit.submit(kfp_api.connect(kfp_api.Connection(host=contract.url)), asked)


def watched(contract: Contract, run_id: str) -> Result:
    return CliRunner().invoke(cli, ["watch", run_id, "--host", contract.url, "--poll", "0.1"])


def lines(output: str) -> list[str]:
    return [re.sub(r"\s+", " ", line.partition("  ")[2]).strip() for line in output.splitlines()]


def test_a_line_for_each_change_and_none_for_what_kfp_adds(contract: Contract, run_id: str) -> None:
    done = watched(contract, run_id)
    assert done.exit_code == 0, done.output
    assert lines(done.output)[:-1] == [
        "run tea-1 pending",
        "brew running",
        "run tea-1 running",
        "brew succeeded 90 s",
        "pour running",
        "pour succeeded 90 s",
        "run tea-1 succeeded",
    ]
    assert "verdict: not known here: MLFLOW_TRACKING_URI does not name a server" in done.output


def test_a_run_that_fails_says_why(contract: Contract, run_id: str) -> None:
    contract.state.script, contract.state.reason = FAILS, "brew: store s3://b does not answer"
    done = watched(contract, run_id)
    assert done.exit_code == 1
    assert "brew failed brew: store s3://b does not answer" in lines(done.output)
    assert "pour skipped" in lines(done.output)
    assert lines(done.output)[-1].startswith("run tea-1 failed This step is in Failed state")
    assert "verdict" not in done.output


def test_a_run_that_was_canceled_has_ended(contract: Contract, run_id: str) -> None:
    contract.state.script = [{"run": "RUNNING"}, {"run": "CANCELING"}, {"run": "CANCELED"}]
    done = watched(contract, run_id)
    assert done.exit_code == 1
    assert lines(done.output)[-1] == "run tea-1 canceled"


def test_outages_are_waited_for(contract: Contract, run_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    api = kfp_api.connect(kfp_api.Connection(host=contract.url))
    hang_up = [(0, "GET")] * 4  # as often as urllib3 tries by itself
    contract.trouble = [(503, "GET"), *hang_up, (401, "GET"), (200, "GET"), (203, "GET")]
    assert watch.follow(api, run_id, poll_s=0.1).state == "SUCCEEDED"
    assert contract.trouble == []
    said = capsys.readouterr().err
    assert said.count("trying again. The run goes on meanwhile") == 1
    assert said.count("answers again") == 1


def test_a_server_that_stays_away_is_no_verdict(
    contract: Contract, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "PATIENCE_S", 0.5)
    api = kfp_api.connect(kfp_api.Connection(host=contract.url))
    contract.token = "changed"
    with pytest.raises(watch.LostSightError, match=r"does not know who you are.*no other answer"):
        watch.follow(api, run_id, poll_s=0.1)


def test_no_such_run(contract: Contract) -> None:
    done = watched(contract, "6e0d3bb5")
    assert done.exit_code == 2
    assert "run 6e0d3bb5 not found" in done.output


def test_ctrl_c_leaves_the_run_running_and_says_how_to_go_on(contract: Contract, run_id: str) -> None:
    contract.state.script = [{"run": "RUNNING", "brew": "RUNNING"}]
    command = [sys.executable, "-m", "reflux.pipelines", "watch", run_id, "--host", contract.url, "--poll", "0.2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "brew" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert f"The run goes on; to see it again: reflux watch {run_id} --host={contract.url}" in said
    assert contract.changes()[-1][1] == "/apis/v2beta1/runs", "nothing was sent that ends it"


@contextmanager
def mlflow(runs: list[dict[str, str]], token: str = "", told: object = None) -> Iterator[str]:
    """Two calls of MLflow's REST interface: experiments on two pages, the first empty, and runs by their tags; or
    always `told`.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if told is not None:
                self.answer(told)
                return
            if self.path == "/api/2.0/mlflow/experiments/search":
                second = {"experiments": [{"experiment_id": "7"}]}
                self.answer(second if "page_token" in asked else {"next_page_token": "second"})
                return
            assert (self.path, asked["experiment_ids"]) == ("/api/2.0/mlflow/runs/search", ["7"])
            wanted = dict(re.findall(r"tags\.`([\w.]+)` = '([^']*)'", asked["filter"]))
            found = [tags for tags in runs if wanted.items() <= tags.items()]
            pairs = [[{"key": key, "value": value} for key, value in tags.items()] for tags in found]
            self.answer({"runs": [{"data": {"tags": tags}} for tags in pairs]})

        def answer(self, content: object) -> None:
            body = json.dumps(content).encode()
            self.send_response(200 if self.headers.get("Authorization", "") == token else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with served(Handler) as url:
        yield url


@pytest.mark.parametrize(("said", "code"), [("pass", 0), ("fail", 3)])
def test_the_gate_decides_the_exit_code_where_mlflow_tells_it(
    contract: Contract, run_id: str, monkeypatch: pytest.MonkeyPatch, said: str, code: int
) -> None:
    role = {"reflux.role": "pipeline"}
    runs = [
        {"kfp.pipeline_run_id": run_id, "reflux.stage": "pour"},
        {"kfp.pipeline_run_id": "another", "reflux.verdict": "other", **role},
        {"kfp.pipeline_run_id": run_id, "reflux.verdict": said, **role},
    ]
    with mlflow(runs) as uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        done = watched(contract, run_id)
    assert done.exit_code == code
    assert f"verdict: {said}" in done.output


def test_a_verdict_that_cannot_be_read_is_not_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("USERNAME", "PASSWORD", "TOKEN"):
        monkeypatch.delenv(f"MLFLOW_TRACKING_{name}", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert verdict.of("1234")[0] == ""
    with mlflow([], token="Bearer t") as uri:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        assert "401 for" in verdict.of("1234")[1]
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t")
        assert verdict.of("1234") == ("", "MLflow has no verdict on run 1234")
    monkeypatch.delenv("MLFLOW_TRACKING_TOKEN")
    for told in ([], "who are you?", {"experiments": [{"experiment_id": "7"}], "runs": ["none"]}):
        with mlflow([], told=told) as uri:
            monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
            assert verdict.of("1234")[1].startswith("MLflow did not tell it (")


@pytest.mark.slow
def test_a_real_mlflow_server_is_asked_in_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    with socket.create_server(("127.0.0.1", 0)) as probe:
        uri = f"http://127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={uri.rpartition(':')[2]}"]
    command += ["--workers=1", f"--backend-store-uri=sqlite:///{tmp_path / 'mlflow.db'}"]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=tmp_path)
    try:
        urllib3.request("GET", f"{uri}/health", retries=urllib3.Retry(20, backoff_factor=0.2, backoff_max=2))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        client, run_id = MlflowClient(tracking_uri=uri), "0f3c0f0e-1111-4222-8333-444455556666"
        assert verdict.of(run_id) == ("", f"MLflow has no verdict on run {run_id}")
        tags = {"kfp.pipeline_run_id": run_id, "reflux.role": "pipeline", "reflux.verdict": "fail"}
        client.create_run(client.create_experiment("KFP-Default"), tags=tags)
        assert verdict.of(run_id) == ("fail", "")
    finally:
        server.terminate()
        server.wait(timeout=30)


def test_only_tasks_with_a_container_are_shown() -> None:
    dag = {"dag": {"tasks": {"inside": {"componentRef": {"name": "stage"}}}}}
    root = {
        "dag": {"tasks": {"loop-1": {"componentRef": {"name": "loop"}}, "last": {"componentRef": {"name": "stage"}}}}
    }
    assert tasks({"root": root, "components": {"loop": dag, "stage": {"executorLabel": "exec"}}}) == {"inside", "last"}
