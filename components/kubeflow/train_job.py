"""A stage in several pods at once: a TrainJob of Kubeflow Trainer runs it, and the task that KFP started only watches.

The pods run `torchrun … -m reflux.components STAGE` on the same store, so that the artifact that they commit is the one
that the task would have made, under the same key, which also names the job. A task that is begun again finds the job of
the attempt before it and watches on; a job that failed is replaced, and its pods go on from the checkpoint.

The fields used are those that Trainer 2.0 to 2.3 share (trainer.kubeflow.org/v1alpha1). Taints, node labels and volumes
of the pods are the runtime's, because each of these versions has another way to override them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reflux.components import environment
from reflux.components.kubeflow import cluster_environment

GROUP, VERSION, PLURAL = "trainer.kubeflow.org", "v1alpha1", "trainjobs"
KEY_LABEL = "reflux.dev/key"
"""Of our jobs; its value is the beginning of the artifact's key, since 63 characters are the most."""
_AWAY_S = 900.0
"""So long the API server may be away before the task gives up."""
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class TrainJobError(Exception):
    """The job did not end well: names it and says why. Beginning the task again may help."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where jobs are made: a client of the API, and the namespace."""

    api: Any
    namespace: str


def here() -> Place:
    """As the pod's service account may, in the pod's namespace; elsewhere as kubectl would."""
    from kubernetes import client, config

    config.load_config()
    if _NAMESPACE.exists():
        return Place(api=client.CustomObjectsApi(), namespace=_NAMESPACE.read_text().strip())
    _, context = config.list_kube_config_contexts()
    return Place(api=client.CustomObjectsApi(), namespace=context["context"].get("namespace", "default"))


def job(asked: Mapping[str, Any], *, stage: str, key: str, run: str, flags: Sequence[str]) -> dict[str, Any]:
    """The TrainJob of one stage's work on `key`. `asked` is what `pods.Placement.train_job` gave, as KFP brought it."""
    accelerator = asked["accelerator"]
    count = int(asked["accelerators"]) if accelerator else 0
    limits = {"memory": asked["memory_limit"], "cpu": asked["cpu_limit"]} | ({accelerator: str(count)} if count else {})
    program = ["python3", "-m", "torch.distributed.run", "-m", "--", "reflux.components", stage]
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "TrainJob",
        "metadata": {
            "name": f"reflux-{stage.replace('_', '-')}-{key[:16]}",
            "labels": {"app.kubernetes.io/part-of": "reflux", KEY_LABEL: key[:40]},
            "annotations": {"reflux.dev/run": run},
        },
        "spec": {
            "runtimeRef": {"name": asked["runtime"]},
            "trainer": {
                "image": asked["image"],
                "command": program,
                "args": [flag.replace("$(", "$$(") for flag in flags],  # Kubernetes reads $(NAME) in arguments
                "env": [
                    *cluster_environment.variables(),
                    {"name": environment.COMPILED_BY, "value": environment.version()},
                ],
                "numNodes": int(asked["nodes"]),
                "numProcPerNode": max(count, 1),
                "resourcesPerNode": {
                    "requests": {"cpu": asked["cpu"], "memory": asked["memory"]},
                    "limits": {name: value for name, value in limits.items() if value},
                },
            },
        },
    }


def run_to_end(place: Place, body: Mapping[str, Any], *, poll_s: float = 10.0) -> None:
    """Create the job, or adopt the one that an earlier attempt left, and watch it to its end. TrainJobError unless it
    completes. ValueError if another's job has its name, or if the cluster or the account lacks what it takes.
    """
    name = body["metadata"]["name"]
    found = _read(place, name)
    if found is not None:
        if found["metadata"].get("labels", {}).get(KEY_LABEL) != body["metadata"]["labels"][KEY_LABEL]:
            raise ValueError(f"TrainJob {name}: is not reflux's for this work; remove it, or rename it")
        if _ended(found):  # of the attempt before: the store has nothing of it but checkpoints
            _delete(place, name)
            while _read(place, name) is not None:
                time.sleep(poll_s)
            found = None
    if found is None:
        _create(place, body)
        print(f"TrainJob {name}: created, {body['spec']['trainer']['numNodes']} pods", flush=True)
    else:
        print(f"TrainJob {name}: found, from an attempt before", flush=True)
    _watch(place, name, poll_s)
    _delete(place, name)


def _watch(place: Place, name: str, poll_s: float) -> None:
    said = ""
    while True:
        found = _read(place, name)
        if found is None:
            raise TrainJobError(f"TrainJob {name}: was deleted while it worked")
        state = _state(found)
        if state != said:
            print(f"TrainJob {name}: {state}", flush=True)
            said = state
        ended = _ended(found)
        if ended == "Complete":
            return
        if ended:
            raise TrainJobError(f"TrainJob {name}: {state}; its pods' logs say more")
        time.sleep(poll_s)


def _ended(found: Mapping[str, Any]) -> str:
    """Complete, Failed, or "" as long as it works."""
    conditions = found.get("status", {}).get("conditions", [])
    return next((c["type"] for c in conditions if c["type"] in ("Complete", "Failed") and c["status"] == "True"), "")


def _state(found: Mapping[str, Any]) -> str:
    ended, status = _ended(found), found.get("status", {})
    if ended:
        condition = next(c for c in status["conditions"] if c["type"] == ended)
        why = " ".join(filter(None, (condition.get("reason"), condition.get("message"))))
        return f"{ended.lower()} ({why})" if why else ended.lower()
    counts = [f"{each['active']} of {each['name']}" for each in status.get("jobsStatus", []) if each.get("active")]
    return f"running ({', '.join(counts)})" if counts else "waits for its pods"


def _read(place: Place, name: str) -> Any:
    """The job, None if there is none. A server that is away is waited for."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    until = time.monotonic() + _AWAY_S
    while True:
        try:
            return place.api.get_namespaced_custom_object(GROUP, VERSION, place.namespace, PLURAL, name)
        except ApiException as error:
            if error.status == 404:
                return None
            if error.status < 500 and error.status != 429:
                raise _refused(error, name) from None
            problem: Exception = error
        except HTTPError as error:
            problem = error
        if time.monotonic() > until:
            raise TrainJobError(f"TrainJob {name}: the API server does not answer ({type(problem).__name__})")
        time.sleep(2.0)


def _create(place: Place, body: Mapping[str, Any]) -> None:
    from kubernetes.client import ApiException

    try:
        place.api.create_namespaced_custom_object(GROUP, VERSION, place.namespace, PLURAL, body)
    except ApiException as error:
        if error.status != 409:  # of two attempts at once the other was first: it is watched
            raise _refused(error, body["metadata"]["name"]) from None


def _delete(place: Place, name: str) -> None:
    from kubernetes.client import ApiException

    try:
        place.api.delete_namespaced_custom_object(GROUP, VERSION, place.namespace, PLURAL, name)
    except ApiException as error:
        if error.status != 404:
            raise _refused(error, name) from None


def _refused(error: Any, name: str) -> Exception:
    if error.status == 404:
        return ValueError(f"TrainJob {name}: the cluster knows no {GROUP}/{VERSION}; install Kubeflow Trainer")
    if error.status in (401, 403):
        return ValueError(
            f"TrainJob {name}: the account may not ({error.status}); bind it to the Role reflux-trainjobs"
        )
    if error.status < 500:
        return ValueError(f"TrainJob {name}: refused ({error.status} {error.reason}: {str(error.body)[:300]})")
    return TrainJobError(f"TrainJob {name}: the API server fails ({error.status} {error.reason})")
