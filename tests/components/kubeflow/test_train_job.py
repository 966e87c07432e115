"""A stage in several pods: the job as Trainer takes it, its fates, and the artifact that its pods leave in a store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tiny_chain
import yaml
from kubernetes import client
from servers import trainer_contract
from servers.trainer_contract import Cluster

from reflux.components import __main__ as entry
from reflux.components import declare, environment
from reflux.components.artifacts import Artifact
from reflux.components.kubeflow import cluster_environment, train_job
from reflux.components.kubeflow.train_job import Place, TrainJobError, run_to_end
from reflux.components.storage import Store
from reflux.pipelines import recipes
from reflux.pipelines.compile import compile_recipe

ASKED = {
    "nodes": 2.0, "runtime": "torch-distributed", "image": "reflux-python-gpu:0.1.0", "cpu": "4", "cpu_limit": "",
    "memory": "16Gi", "memory_limit": "16Gi", "accelerator": "nvidia.com/gpu", "accelerators": "4",
}  # fmt: skip
KEY = "ab" * 32
NAME = f"reflux-distill-{KEY[:16]}"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with trainer_contract.served() as made:
        yield made


@pytest.fixture
def place(cluster: Cluster) -> Place:
    settings = client.Configuration(host=cluster.url)
    settings.retries = False
    return Place(api=client.CustomObjectsApi(client.ApiClient(settings)), namespace="team-a")


def body(**changes: Any) -> dict[str, Any]:
    return train_job.job(ASKED | changes, stage="distill", key=KEY, run="r", flags=["--store=s3://b/$(HOME)"])


def ends(condition: str, *, after: int = 1, **why: str) -> Callable[[Cluster, str], None]:
    """A job that runs for some looks and then is over."""
    looks = iter(range(after + 1))

    def on_read(cluster: Cluster, name: str) -> None:
        if next(looks, after) < after:
            cluster.jobs[name]["status"] = {"jobsStatus": [{"name": "node", "active": 2}]}
        else:
            cluster.end(name, condition, **why)

    return on_read


def test_the_job_is_one_that_trainer_takes() -> None:
    made = body()
    jsonschema.validate(made, trainer_contract.SCHEMA)
    trainer = made["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["resourcesPerNode"] == {
        "requests": {"cpu": "4", "memory": "16Gi"}, "limits": {"memory": "16Gi", "nvidia.com/gpu": "4"}
    }  # fmt: skip
    assert trainer["args"] == ["--store=s3://b/$$(HOME)"], "Kubernetes would replace $(HOME)"
    given = {*cluster_environment.KEYS_GIVE, *cluster_environment.SETTINGS_GIVE}
    *references, compiled_by = trainer["env"]
    assert {variable["name"] for variable in references} == given
    assert not any("value" in variable for variable in references), "by reference alone"
    assert compiled_by == {"name": environment.COMPILED_BY, "value": environment.version()}
    on_processors = body(accelerator="")["spec"]["trainer"]
    assert on_processors["numProcPerNode"] == 1
    assert on_processors["resourcesPerNode"]["limits"] == {"memory": "16Gi"}


@pytest.mark.parametrize("path", ["spec.trainer.numNodes", "spec.runtimeRef.name", "spec.trainer.resourcesPerNode"])
def test_the_contract_refuses_other_names(path: str) -> None:
    wrong = json.loads(json.dumps(body()))
    *folders, last = path.split(".")
    inner = wrong
    for folder in folders:
        inner = inner[folder]
    inner[f"{last}s"] = inner.pop(last)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, trainer_contract.SCHEMA)


def test_created_watched_and_removed(cluster: Cluster, place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.on_read = ends("Complete", after=2)
    run_to_end(place, body(), poll_s=0.01)
    assert cluster.jobs == {}
    assert cluster.log == [f"GET {NAME}", f"POST {NAME}", *[f"GET {NAME}"] * 3, f"DELETE {NAME}"]
    assert capsys.readouterr().out.splitlines() == [
        f"TrainJob {NAME}: created, 2 pods", f"TrainJob {NAME}: running (2 of node)", f"TrainJob {NAME}: complete"
    ]  # fmt: skip


def test_a_failed_job_says_why_and_the_next_attempt_makes_it_anew(cluster: Cluster, place: Place) -> None:
    cluster.on_read = ends("Failed", reason="JobsFailed", message="a pod of node failed")
    with pytest.raises(
        TrainJobError, match=rf"TrainJob {NAME}: failed \(JobsFailed a pod of node failed\); its pods' logs"
    ):
        run_to_end(place, body(), poll_s=0.01)
    assert NAME in cluster.jobs, "left for whoever wants to see it"
    cluster.on_read = lambda cluster, name: None
    first, cluster.log = cluster.jobs[NAME], []

    def complete_the_second(cluster: Cluster, name: str) -> None:
        if cluster.jobs[name] is not first:
            cluster.end(name, "Complete")

    cluster.on_read = complete_the_second
    run_to_end(place, body(), poll_s=0.01)
    assert [entry.split()[0] for entry in cluster.log] == ["GET", "DELETE", "GET", "POST", "GET", "DELETE"]


def test_deleted_while_it_is_watched(cluster: Cluster, place: Place) -> None:
    cluster.on_read = lambda cluster, name: cluster.jobs.pop(name) and None
    with pytest.raises(TrainJobError, match=f"TrainJob {NAME}: was deleted while it worked"):
        run_to_end(place, body(), poll_s=0.01)


def test_a_task_that_is_begun_again_adopts_its_job(
    cluster: Cluster, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.jobs[NAME] = body()
    cluster.on_read = ends("Complete", after=2)
    run_to_end(place, body(), poll_s=0.01)
    assert not any(entry.startswith("POST") for entry in cluster.log)
    assert capsys.readouterr().out.startswith(f"TrainJob {NAME}: found, from an attempt before\n")


def test_of_two_attempts_at_once_the_second_watches_the_firsts(cluster: Cluster, place: Place) -> None:
    """Its name is taken between looking and creating."""
    train_job._create(place, body())
    cluster.on_read = ends("Complete")
    train_job._create(place, body())
    assert list(cluster.jobs) == [NAME]


def test_the_job_of_a_stranger_is_left_alone(cluster: Cluster, place: Place) -> None:
    cluster.jobs[NAME] = body() | {"metadata": {"name": NAME}}
    with pytest.raises(ValueError, match=f"TrainJob {NAME}: is not reflux's for this work"):
        run_to_end(place, body(), poll_s=0.01)
    assert NAME in cluster.jobs


@pytest.mark.parametrize(
    ("installed", "refuse", "message"),
    [
        (False, 0, "the cluster knows no trainer.kubeflow.org/v1alpha1; install Kubeflow Trainer"),
        (True, 403, r"the account may not \(403\); bind it to the Role reflux-trainjobs"),
    ],
)
def test_what_the_cluster_lacks_is_said(
    cluster: Cluster, place: Place, installed: bool, refuse: int, message: str
) -> None:
    cluster.installed, cluster.refuse = installed, refuse
    with pytest.raises(ValueError, match=message):
        run_to_end(place, body(), poll_s=0.01)


def test_the_pipeline_hands_the_task_what_its_job_needs() -> None:
    changes = {"kubernetes": {"distill": {"pods": 2, "memory": "24Gi"}}}
    specification, _ = yaml.safe_load_all(
        compile_recipe("demo", recipes.overridden(recipes.demo(), changes), image="registry/python-gpu:1")
    )
    task = specification["components"]["comp-exit-handler-1"]["dag"]["tasks"]["distill"]
    given = task["inputs"]["parameters"]
    assert given["train_job"]["runtimeValue"]["constant"] == {
        name: value for name, value in (ASKED | {"memory": "24Gi", "memory_limit": "24Gi"}).items()
        if not name.startswith("accelerator")
    } | {"image": "registry/python-gpu:1"}  # fmt: skip
    assert given["accelerator"] == {"componentInputParameter": "pipelinechannel--accelerator"}
    resources = specification["deploymentSpec"]["executors"]["exec-distill"]["container"]["resources"]
    assert "accelerator" not in resources, "it only watches"
    assert resources["resourceMemoryRequest"] == "4Gi"
    with pytest.raises(
        ValueError, match=r"kubernetes.distill.node_selector .*ClusterTrainingRuntime torch-distributed"
    ):
        recipes.overridden(recipes.demo(), {"kubernetes": {"distill": {"pods": 2, "node_selector": ["pool=a"]}}})


@pytest.mark.slow
def test_the_task_hands_on_what_the_pods_committed(
    cluster: Cluster, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pods are played by one process on the job's own command line, so what they get is all that they need."""
    chain = tiny_chain.make(tmp_path, tiny_model)
    config = chain.training(max_steps=1, validation_traces=0)
    values = declare.key_fields(config) | declare.other_fields(config) | declare.source_fields(config)
    shown = ("student", "metrics", "summary")
    document = {
        "inputs": {
            "parameterValues": json.loads(json.dumps(values), parse_int=float) | {
                "store": str(tmp_path), "run": "r", "job": "12345678", "overrides": {},
                "train_job": {name: value for name, value in ASKED.items() if not name.startswith("accelerator")},
                "accelerator": "", "accelerators": "1",
            },
            "artifacts": {
                name: {"artifacts": [{"uri": str(tmp_path / f"{name}.json")}]} for name in tiny_chain.PARENTS
            },
        },
        "outputs": {
            "artifacts": {name: {"artifacts": [{"uri": str(tmp_path / "out" / name)}]} for name in shown},
            "outputFile": str(tmp_path / "out" / "output.json"),
        },
    }  # fmt: skip
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    settings = {
        "apiVersion": "v1", "kind": "Config", "current-context": "c", "users": [{"name": "u", "user": {}}],
        "clusters": [{"name": "k", "cluster": {"server": cluster.url}}],
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u", "namespace": "team-a"}}],
    }  # fmt: skip
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(settings))
    for module in ("kubernetes.config", "kubernetes.config.kube_config"):  # which read KUBECONFIG when imported
        monkeypatch.setattr(f"{module}.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))

    def work(cluster: Cluster, name: str) -> None:
        trainer = cluster.jobs[name]["spec"]["trainer"]
        assert trainer["command"] == [
            "python3",
            "-m",
            "torch.distributed.run",
            "-m",
            "--",
            "reflux.components",
            "distill",
        ]
        args = [text.replace("/tmp/student.json", str(tmp_path / "of-the-pods.json")) for text in trainer["args"]]
        assert entry.main(["distill", *args]) == 0
        cluster.end(name, "Complete")

    cluster.on_read = work
    assert entry.main(["distill", "--executor-input", json.dumps(document)]) == 0
    student = Artifact.load(Store.open(str(tmp_path)), (tmp_path / "out" / "student").read_bytes())
    assert student.parents == {name: getattr(chain, name).digest for name in tiny_chain.PARENTS}
    told = json.loads((tmp_path / "out" / "output.json").read_text())["artifacts"]["student"]["artifacts"][0]
    assert told["metadata"]["reused"] == "no", "this run made it, elsewhere"
    assert cluster.jobs == {}
