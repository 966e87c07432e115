"""`reflux submit` against the contract test's server: what is sent, once and typed, and what is refused before."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from import_blocked import HEAVY, without
from servers import certificates
from servers.kfp_api_contract import Contract, serving
from servers.loopback import served
from toy_stages.pipeline import tea_party

from reflux.pipelines.compile import compile_to_text
from reflux.pipelines.kubeflow import kfp_api, submit
from reflux.pipelines.kubeflow.kfp_api import Connection
from reflux.pipelines.kubeflow.package import Package


@pytest.fixture
def contract() -> Iterator[Contract]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def package() -> Package:
    return Package(text=compile_to_text(tea_party(note="mild", minutes=7)))


def asked(package: Package, **changes: Any) -> submit.Asked:
    given: dict[str, Any] = {
        "recipe": "tea", "config": None, "name": "", "pipeline": "", "experiment": "reflux", "pipeline_root": "",
        "service_account": "", "texts": ["store=/s", "leaves=assam"],
    }  # fmt: skip
    return submit.asked(package, **{**given, **changes})


def test_what_is_missing_is_made_and_the_run_is_pinned_to_its_version(contract: Contract, package: Package) -> None:
    api = kfp_api.connect(Connection(host=contract.url))
    wanted = asked(package, name="first", pipeline_root="s3://reflux/kfp", service_account="reflux-runner")
    run = contract.state.runs[submit.submit(api, wanted)]
    ((pipeline_id, pipeline),) = contract.state.pipelines.items()
    ((version_id, version),) = contract.state.versions.items()
    ((experiment_id, experiment),) = contract.state.experiments.items()
    assert pipeline["display_name"] == "reflux-tea-submitted"
    assert version["display_name"] == f"reflux-tea-submitted-{package.digest[:12]}"
    assert version["pipeline_spec"]["pipeline_spec"] == package.spec
    assert experiment["display_name"] == "reflux"
    assert run["display_name"] == "first"
    assert run["experiment_id"] == experiment_id
    assert run["pipeline_version_reference"] == {"pipeline_id": pipeline_id, "pipeline_version_id": version_id}
    assert run["runtime_config"] == {
        "parameters": {"store": "/s", "leaves": "assam", "run": "first"},
        "pipeline_root": "s3://reflux/kfp",
    }
    assert run["service_account"] == "reflux-runner"


def test_submitting_again_makes_a_run_and_nothing_else(contract: Contract, package: Package) -> None:
    api = kfp_api.connect(Connection(host=contract.url))
    for number in range(3):  # more pipelines, versions and experiments than one page holds
        other = Package(text=package.text.replace("mild", f"note {number}"))
        submit.submit(api, asked(other, pipeline=f"reflux-other-{number}", experiment=f"other {number}"))
        submit.submit(api, asked(other))
    submit.submit(api, asked(package))
    before = len(contract.changes())
    submit.submit(api, asked(package, name="second"))
    assert [(verb, path) for verb, path, _ in contract.changes()[before:]] == [("POST", "/apis/v2beta1/runs")]
    changed = Package(text=package.text.replace("mild", "strong"))
    submit.submit(api, asked(changed))
    assert len(contract.changes()[before:]) == 3  # the other bytes are another version of the same pipeline
    assert {each["display_name"] for each in contract.state.pipelines.values()} == {
        "reflux-tea-submitted", *(f"reflux-other-{number}" for number in range(3)),
    }  # fmt: skip


def test_an_interrupted_submit_goes_on_from_what_is_there(contract: Contract, package: Package) -> None:
    api = kfp_api.connect(Connection(host=contract.url))
    contract.state.serve("pipeline_service_create_pipeline", {}, {}, {"display_name": "reflux-tea-submitted"})
    submit.submit(api, asked(package))
    assert len(contract.state.pipelines) == len(contract.state.versions) == 1


def test_dry_run_shows_what_would_be_sent_and_sends_nothing(
    contract: Contract, package: Package, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = asked(package, name="try")
    assert submit.submit(kfp_api.connect(Connection(host=contract.url), dry_run=True), wanted) == ""
    assert contract.changes() == []
    lines = [line.partition(": ") for line in capsys.readouterr().out.splitlines()]
    shown = {what: json.loads(body) for what, _, body in lines}
    assert shown["would create pipeline reflux-tea-submitted"] == {"pipeline": {"display_name": "reflux-tea-submitted"}}
    run = shown["would create run try"]["run"]
    assert run["experiment_id"] == "<experiment reflux>"

    submit.submit(kfp_api.connect(Connection(host=contract.url)), wanted)
    (sent,) = [body for _, path, body in contract.changes() if path == "/apis/v2beta1/runs"]
    ids = {key: sent[key] for key in ("experiment_id", "pipeline_version_reference")}
    assert sent == run | ids
    capsys.readouterr()
    submit.submit(kfp_api.connect(Connection(host=contract.url), dry_run=True), wanted)
    assert capsys.readouterr().out == f"would create run try: {json.dumps({'run': sent})}\n"


def test_the_command_needs_only_kfp_and_waits(contract: Contract) -> None:
    contract.state.script = [{"run": "RUNNING", "distill": "RUNNING"}, {"run": "SUCCEEDED", "distill": "SUCCEEDED"}]
    overrides = '{"distill": {"max_steps": 2}}'
    arguments = ["--arg", "store=s3://reflux/artifacts", "--arg", f"overrides={overrides}", "--name", "try"]
    arguments += ["--host", contract.url, "--wait", "--poll", "0.1"]
    done = without(HEAVY[:-1], "submit", "--recipe", "demo", *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    ((run_id, run),) = contract.state.runs.items()
    told = done.stdout.splitlines()
    assert told[4:6] == [f"run: {run_id}", f"page: {contract.url}/#/runs/details/{run_id}"]
    assert [" ".join(line.split()[1:]) for line in told[6:-1]] == [
        "distill running", "run try running", "distill succeeded 90 s", "run try succeeded",
    ]  # fmt: skip
    assert run["runtime_config"]["parameters"] == {
        "store": "s3://reflux/artifacts", "run": "try", "overrides": {"distill": {"max_steps": 2}},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"texts": ["store=/s", "leafs=x"]}, "argument leafs: no such input; did you mean leaves?"),
        ({"texts": ["store=/s"]}, "no value for leaves"),
        ({"texts": ["store"]}, "--arg 'store': write NAME=VALUE"),
        ({"name": "Bob's"}, 'argument run "Bob\'s": a quote, or a backslash at its end'),
        ({"texts": ["store=/s", "leaves=x", "run=a\\"]}, "cannot be searched for in MLflow"),
        ({"pipeline": "Tea Party"}, "--pipeline 'Tea Party': use up to 63 small letters"),
    ],
)
def test_wrong_input_is_found_without_a_server(package: Package, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"argument|no value|--") as caught:
        asked(package, **changes)
    assert message in str(caught.value)


def refusal(connection: Connection) -> str:
    with pytest.raises((ValueError, OSError)) as caught:
        kfp_api.connect(connection)
    return str(caught.value)


def test_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KF_PIPELINES_ENDPOINT", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    assert "--host: missing, and KF_PIPELINES_ENDPOINT is not set" in refusal(Connection())
    assert "must begin with http:// or https://" in refusal(Connection(host="kubeflow.example"))
    said = refusal(Connection(host="https://me:secret@kubeflow.example/pipeline"))
    assert "names a user" in said
    assert "secret" not in said


def test_the_host_of_kfps_own_variable(contract: Contract, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", contract.url)
    assert kfp_api.connect(Connection()).host == contract.url


def test_a_login_page_is_not_the_api(tmp_path: Path) -> None:
    page = tmp_path / "apis" / "v2beta1" / "healthz"
    page.parent.mkdir(parents=True)
    page.write_text("<html>Who are you?</html>")
    with served(functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))) as url:
        said = refusal(Connection(host=url))
    assert "answers, but not as the API of Kubeflow Pipelines; where a login page stands before it" in said


def test_a_server_that_is_not_there_or_is_something_else(contract: Contract) -> None:
    assert "http://127.0.0.1:9: cannot be reached" in refusal(Connection(host="http://127.0.0.1:9"))
    assert "there is no API of Kubeflow Pipelines 2 here" in refusal(Connection(host=f"{contract.url}/pipelines"))


@pytest.mark.parametrize(
    ("status", "message"),
    [(401, "give --token-file"), (403, "is --namespace yours?"), (503, "does not answer as it should (503: trouble")],
)
def test_refusals_say_what_to_do_and_are_asked_for_once(contract: Contract, status: int, message: str) -> None:
    contract.trouble = [(status, "GET")]
    assert message in refusal(Connection(host=contract.url))
    assert contract.trouble == []
    assert contract.asked == []


def test_a_token_is_read_anew_for_every_request(contract: Contract, tmp_path: Path, package: Package) -> None:
    contract.token = "one"
    (tmp_path / "token").write_text("one\n")
    assert "does not know who you are (401" in refusal(Connection(host=contract.url))
    api = kfp_api.connect(Connection(host=contract.url, token_file=tmp_path / "token"))
    contract.token = "two"
    (tmp_path / "token").write_text("two\n")
    submit.submit(api, asked(package))
    (tmp_path / "token").write_text("")
    assert "is empty" in refusal(Connection(host=contract.url, token_file=tmp_path / "token"))
    assert "cannot be read" in refusal(Connection(host=contract.url, token_file=tmp_path / "tokens"))


@pytest.mark.parametrize("trouble", [(200, "GET"), (200, "POST"), (203, "POST")])
def test_a_proxy_that_answers_for_the_server_is_noticed(
    contract: Contract, package: Package, trouble: tuple[int, str]
) -> None:
    api = kfp_api.connect(Connection(host=contract.url))
    contract.trouble = [trouble]
    with pytest.raises(OSError, match="answers, but not as the API"):
        submit.submit(api, asked(package))
    assert contract.state.pipelines == {}


def test_a_run_that_may_have_been_made_is_not_called_unmade(contract: Contract, package: Package) -> None:
    api = kfp_api.connect(Connection(host=contract.url))
    submit.submit(api, asked(package))
    contract.trouble = [(0, "POST")]
    with pytest.raises(OSError, match="whether the run was made is not known: look for again in the experiment reflux"):
        submit.submit(api, asked(package, name="again"))


def test_many_users(package: Package) -> None:
    with serving(multi_user=True) as contract:
        assert "--namespace: missing" in refusal(Connection(host=contract.url))
        api = kfp_api.connect(Connection(host=contract.url, namespace="team-a"))
        submit.submit(api, asked(package))
        submit.submit(api, asked(package, name="again"))
        (pipeline,), (experiment,) = contract.state.pipelines.values(), contract.state.experiments.values()
        assert (pipeline["namespace"], experiment["namespace"]) == ("team-a", "team-a")


def test_tls(tmp_path: Path) -> None:
    certificate = certificates.make(tmp_path)
    with serving(certificate) as contract:
        assert kfp_api.connect(Connection(host=contract.url, ca_cert=certificate.authority)).host == contract.url
        assert "--ca-cert FILE names the authority to trust" in refusal(Connection(host=contract.url))
    assert "no certificates in PEM form" in refusal(Connection(host=contract.url, ca_cert=certificate.private))
