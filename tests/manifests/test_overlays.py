"""What an overlay makes of the manifests is complete, and no more powerful than it has to be. No cluster is asked."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kustomized
import pytest
import yaml
from kustomized import MANIFESTS, OVERLAYS, containers, of_kind, overlay, pods

from reflux.components.kubeflow import train_job

PROVIDED = {"reflux-object-store", "mlflow-database"}  # Secrets that people bring: manifests/secrets
SECRET_NAME = re.compile(r"PASSWORD|SECRET|TOKEN|CREDENTIAL|ACCESS_KEY", re.IGNORECASE)
every_overlay = pytest.mark.parametrize("name", OVERLAYS)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Name -> keys of the Secrets."""
    made = kustomized.secrets(tmp_path_factory.mktemp("secrets"))
    return {name: each["data"] for name, each in of_kind(made, "Secret").items()}


def references(found: tuple[dict[str, Any], ...]) -> Iterator[tuple[str, str, str]]:
    """(kind, name, key) of everything that a pod cannot start without; key "" for the whole object."""
    for pod in pods(found).values():
        yield "ServiceAccount", pod["spec"]["serviceAccountName"], ""
        for container in containers(pod):
            for variable in container.get("env", []):
                for kind, reference in variable.get("valueFrom", {}).items():
                    if kind != "fieldRef" and not reference.get("optional"):
                        yield {"configMapKeyRef": "ConfigMap", "secretKeyRef": "Secret"}[kind], *_named(reference)
            for source in container.get("envFrom", []):
                for kind, reference in source.items():
                    yield {"configMapRef": "ConfigMap", "secretRef": "Secret"}[kind], reference["name"], ""
        for volume in pod["spec"].get("volumes", []):
            if "secret" in volume:
                yield "Secret", volume["secret"]["secretName"], ""
            if "configMap" in volume:
                yield "ConfigMap", volume["configMap"]["name"], ""


def _named(reference: dict[str, str]) -> tuple[str, str]:
    return reference["name"], reference["key"]


def test_there_are_two() -> None:
    assert OVERLAYS == ("cluster", "local")


@every_overlay
def test_everything_stands_in_one_namespace(name: str) -> None:
    (namespace,) = {each["metadata"]["namespace"] for each in overlay(name)}
    settings = of_kind(overlay(name), "ConfigMap")["reflux-settings"]["data"]
    assert settings["MLFLOW_TRACKING_URI"] == f"http://mlflow.{namespace}:5000"
    hosts = settings["MLFLOW_SERVER_ALLOWED_HOSTS"].split(",")
    assert {f"mlflow.{namespace}{end}:5000" for end in ("", ".svc", ".svc.cluster.local")} <= set(hosts)
    assert "*" not in hosts


@every_overlay
def test_what_a_pod_names_is_there_or_is_to_be_provided(name: str, secrets: dict[str, dict[str, str]]) -> None:
    assert secrets.keys() == PROVIDED
    found = overlay(name)
    known = {("Secret", secret): keys for secret, keys in secrets.items()}
    known |= {("ConfigMap", each): content["data"] for each, content in of_kind(found, "ConfigMap").items()}
    known |= {("ServiceAccount", each): {} for each in of_kind(found, "ServiceAccount")}
    asked = list(references(found))
    assert {kind for kind, _, _ in asked} == {"ServiceAccount", "ConfigMap", "Secret"}
    missing = [each for each in asked if each[:2] not in known or (each[2] and each[2] not in known[each[:2]])]
    assert missing == []


@every_overlay
def test_services_policies_and_bindings_reach_what_they_name(name: str) -> None:
    found = overlay(name)
    labels = [pod["metadata"]["labels"] for pod in pods(found).values()]

    def reached(selector: dict[str, str]) -> bool:
        return any(selector.items() <= each.items() for each in labels)

    assert all(reached(service["spec"]["selector"]) for service in of_kind(found, "Service").values())
    policies = of_kind(found, "NetworkPolicy").values()
    assert all(reached(policy["spec"]["podSelector"]["matchLabels"]) for policy in policies)
    guarded = [policy["spec"]["podSelector"]["matchLabels"] for policy in policies]
    assert all(any(selector.items() <= each.items() for selector in guarded) for each in labels)
    for binding in of_kind(found, "RoleBinding").values():
        assert binding["roleRef"]["name"] in of_kind(found, "Role")
        assert {subject["name"] for subject in binding["subjects"]} <= of_kind(found, "ServiceAccount").keys()
        assert {subject["namespace"] for subject in binding["subjects"]} == {binding["metadata"]["namespace"]}


@every_overlay
def test_ports_are_known_by_the_names_that_are_used(name: str) -> None:
    found = overlay(name)
    for pod in pods(found).values():
        for container in containers(pod):
            ports = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
            probes = [container[probe] for probe in container if probe.endswith("Probe")]
            assert {probe["httpGet"]["port"] for probe in probes if "httpGet" in probe} <= ports.keys()
            listening = [flag.partition("=")[2] for flag in container.get("args", []) if flag.startswith("--port=")]
            assert set(map(int, listening)) <= set(ports.values())
    named = {port["name"] for pod in pods(found).values() for each in containers(pod) for port in each.get("ports", [])}
    targets = {
        port["targetPort"] for service in of_kind(found, "Service").values() for port in service["spec"]["ports"]
    }
    assert targets <= named


@every_overlay
def test_every_container_is_confined(name: str) -> None:
    found = {
        f"{workload}/{c['name']}": (pod, c) for workload, pod in pods(overlay(name)).items() for c in containers(pod)
    }
    assert len(found) >= 2
    for container, (pod, spec) in found.items():
        context = pod["spec"]["securityContext"]
        assert context["runAsNonRoot"] is True, container
        assert context["runAsUser"] > 0, container
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, container
        own = spec["securityContext"]
        assert own == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }, container  # fmt: skip
        assert {"cpu", "memory"} <= spec["resources"]["requests"].keys(), container
        assert "memory" in spec["resources"]["limits"], container
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod["spec"].keys(), container
        assert pod["spec"]["enableServiceLinks"] is False, "the Service mlflow would set MLFLOW_PORT to an address"


@every_overlay
def test_images_have_a_version(name: str) -> None:
    """The very bytes of public ones, and of our own the version of this tree."""
    version = tomllib.loads((MANIFESTS.parent / "pyproject.toml").read_text())["project"]["version"]
    for pod in pods(overlay(name)).values():
        for image in (container["image"] for container in containers(pod)):
            ours = re.search(r"(?:^|/)reflux-python-(cpu|mlflow)[:@]", image)
            pinned = re.search(r"@sha256:[0-9a-f]{64}$", image)
            assert pinned or (ours and image.endswith(f":{version}")), image


@every_overlay
def test_the_stages_get_the_image_that_registers_them(name: str) -> None:
    (container,) = containers(pods(overlay(name))["Job/reflux-register"])
    (value,) = [variable["value"] for variable in container["env"] if variable["name"] == "IMAGE"]
    assert value == container["image"]
    assert "--image=$(IMAGE)" in container["args"]


@every_overlay
def test_no_secret_is_written_down(name: str) -> None:
    found = overlay(name)
    assert of_kind(found, "Secret") == {}
    for pod in pods(found).values():
        for container in containers(pod):
            literals = {each["name"] for each in container["env"] if each.get("value")}
            assert not [variable for variable in literals if SECRET_NAME.search(variable)]
    for values in of_kind(found, "ConfigMap").values():
        assert not [key for key in values["data"] if SECRET_NAME.search(key)]
    assert not re.search(r"\w://[^/\s]*:[^/\s]*@", json.dumps(found)), "a URI with a password in it"


def test_nothing_in_git_fills_in_a_secret() -> None:
    for example in (MANIFESTS / "secrets").glob("*.env.example"):
        lines = [line for line in example.read_text().splitlines() if line and not line.startswith("#")]
        assert lines
        assert all(re.fullmatch(r"\w+=", line) for line in lines), example
    assert "manifests/secrets/*.env" in (MANIFESTS.parent / ".gitignore").read_text().splitlines()


@every_overlay
def test_rights_are_few_and_named(name: str) -> None:
    """A run may read two Secrets by name, report to Argo, look at pods; who registers may do that and no more. With the
    cluster's overlay a run may make TrainJobs too.
    """
    roles = {role: rights["rules"] for role, rights in of_kind(overlay(name), "Role").items()}
    trainjobs = roles.pop("reflux-trainjobs", None)
    assert roles.keys() == {"reflux-runner", "reflux-register"}
    if name == "cluster":
        asked = {"apiGroups": [train_job.GROUP], "resources": [train_job.PLURAL], "verbs": ["create", "get", "delete"]}
        assert trainjobs == [asked]
        binding = of_kind(overlay(name), "RoleBinding")["reflux-trainjobs"]
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "reflux-runner", "namespace": "kubeflow"}]
    else:
        assert trainjobs is None
    assert of_kind(overlay(name), "ClusterRole") == of_kind(overlay(name), "ClusterRoleBinding") == {}
    for rule in (rule for rules in roles.values() for rule in rules):
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        if {"secrets", "configmaps"} & set(rule["resources"]):
            assert rule["resourceNames"]
            assert rule["verbs"] == ["get"]
        if "" in rule["apiGroups"]:
            assert not {"create", "update", "patch", "delete", "deletecollection"} & set(rule["verbs"])
    groups = {group for rule in roles["reflux-register"] for group in rule["apiGroups"]}
    assert groups == {"pipelines.kubeflow.org"}


@every_overlay
def test_only_runs_get_a_token_of_kubernetes(name: str) -> None:
    accounts = of_kind(overlay(name), "ServiceAccount")
    given = {each for each, account in accounts.items() if account.get("automountServiceAccountToken", True)}
    assert given == {"reflux-runner"}
    assert all(pod["spec"]["automountServiceAccountToken"] is False for pod in pods(overlay(name)).values())


def test_the_launcher_and_the_stages_mean_one_store(secrets: dict[str, dict[str, str]]) -> None:
    found = overlay("cluster")
    settings = of_kind(found, "ConfigMap")["reflux-settings"]["data"]
    launcher = of_kind(found, "ConfigMap")["kfp-launcher"]["data"]
    s3 = yaml.safe_load(launcher["providers"])["s3"]["default"]
    scheme = "http" if s3["disableSSL"] else "https"
    assert settings["AWS_ENDPOINT_URL_S3"] == f"{scheme}://{s3['endpoint']}"
    assert settings["AWS_REGION"] == s3["region"]
    secret = s3["credentials"]["secretRef"]
    assert {secret["accessKeyKey"], secret["secretKeyKey"]} <= secrets[secret["secretName"]].keys()
    runner = of_kind(found, "Role")["reflux-runner"]["rules"]
    readable = {name for rule in runner if "secrets" in rule["resources"] for name in rule["resourceNames"]}
    assert secret["secretName"] in readable
    assert launcher["defaultPipelineRoot"].startswith("s3://")


def test_a_folder_that_is_wrong_is_not_built(tmp_path: Path) -> None:
    """What the other tests lean on: kustomize refuses what it does not know."""
    (tmp_path / "kustomization.yaml").write_text("resources: [gone.yaml]\n")
    with pytest.raises(AssertionError, match=r"gone\.yaml"):
        kustomized.objects(tmp_path)
