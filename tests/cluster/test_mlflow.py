"""MLflow's server as the manifests start it, with PostgreSQL and S3, and what a person sees of a run in its pages."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from kustomized import containers, of_kind, overlay, pods
from servers import browser, mlflow_server, seaweed

from reflux.components import __main__ as entry
from reflux.components import tracking
from reflux.components.storage import S3Settings, Store

PLACE = f"s3://{seaweed.BUCKET}/mlflow"
RUN = "tea-20261129-120000"
MLFLOWS_OWN = re.compile(r"ResizeObserver loop|/users/current\)$")
"""What its pages report as errors on any server: a notice of the table's, and that nobody is logged in."""


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Settings]:
    with seaweed.running(tmp_path_factory.mktemp("s3")) as settings:
        yield settings


@pytest.fixture(scope="module")
def server(s3: S3Settings) -> Iterator[str]:
    with mlflow_server.running(s3, PLACE) as address:
        yield address


@pytest.fixture(scope="module")
def tree(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A finished run of two stages, tracked as every run is. The id of its experiment."""
    folder = tmp_path_factory.mktemp("tree")
    (folder / "leaves.txt").write_text("assam")
    (folder / "report.html").write_text("<!doctype html><title>reflux</title><h1>Is it good enough?</h1>")
    store = ["--store", str(folder / "store"), "--run", RUN]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", server)
        patch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
        tracking.begin_pipeline(RUN, {"recipe": "tea"}, store=Store.open(str(folder / "store")))
        brew = ["--leaves", str(folder / "leaves.txt"), "--out-tea", str(folder / "tea.json")]
        assert entry.main(["toy_stages.brew", *store, *brew, "--minutes", "5"]) == 0
        pour = ["--tea", str(folder / "tea.json"), "--out-cup", str(folder / "cup.json")]
        assert entry.main(["toy_stages.pour", *store, *pour]) == 0
        tracking.end_pipeline(
            RUN, status="FINISHED", verdict="pass", root="sha256:ab", report=folder / "report.html",
        )  # fmt: skip
        from mlflow import MlflowClient

        yield MlflowClient(tracking_uri=server).get_experiment_by_name(tracking.EXPERIMENT).experiment_id


def answer(url: str, host: str = "") -> int:
    """The status of a request; `host` is the name under which the server is asked for."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers={"Host": host} if host else {})) as got:
            return int(got.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_it_answers_to_the_names_that_a_cluster_gives_it_and_no_other(server: str) -> None:
    asked = f"{server}/api/2.0/mlflow/experiments/get-by-name?experiment_name=Default"
    tracked = of_kind(overlay("local"), "ConfigMap")["reflux-settings"]["data"]["MLFLOW_TRACKING_URI"]
    assert answer(asked, tracked.removeprefix("http://")) == 200
    assert answer(asked, "mlflow.kubeflow.svc.cluster.local:5000") == 200
    assert answer(asked, "mlflow.attacker.example:5000") == 403


def test_the_probes_ask_for_something_that_answers(server: str) -> None:
    (container,) = containers(pods(overlay("local"))["Deployment/mlflow"])
    paths = {container[probe]["httpGet"]["path"] for probe in container if probe.endswith("Probe")}
    assert {answer(f"{server}{path}", "10.0.0.7:5000") for path in paths} == {200}


def test_clients_without_keys_put_artifacts_into_the_bucket(tree: str, s3: S3Settings) -> None:
    assert [key for key in Store.open(PLACE, s3).list("") if key.endswith("/report.html")]


def test_the_tree_of_runs(server: str, tree: str, tmp_path: Path) -> None:
    """One parent with a verdict, a nested run for each stage with its metrics; no script fails, all is from here."""
    with browser.window(server) as window:
        page = window.page
        page.set_default_timeout(60_000)
        page.goto(f"{server}/#/experiments/{tree}/runs")
        parent = page.get_by_role("row").filter(has=page.get_by_role("link", name=RUN))
        parent.wait_for()
        assert page.get_by_role("link", name="brew").count() == 0  # nested: the parent's row has to be opened
        parent.get_by_role("button").click()
        for stage in ("brew", "pour"):
            page.get_by_role("link", name=stage).wait_for()
        page.screenshot(path=tmp_path / "runs.png")

        page.get_by_role("link", name="brew").click()
        page.wait_for_url(re.compile("/runs/[0-9a-f]{32}"))
        page.get_by_text("cups", exact=True).first.wait_for()
        page.screenshot(path=tmp_path / "stage.png")

        page.get_by_role("link", name=RUN).first.click()  # a stage names its parent
        page.get_by_text("reflux.verdict").first.wait_for()
        page.screenshot(path=tmp_path / "parent.png")
        assert window.outside == []
        assert [line for line in window.failed if not MLFLOWS_OWN.search(line)] == []
