"""What a task asks of Kubernetes: processors, memory, accelerators, where it may run, how often it is begun again.

It is data: a `Pod` for every task, with defaults for models of about a billion parameters, which a table changes:

    [kubernetes.distill]
    memory = "24Gi"
    tolerations = ["spot=true:NoSchedule"]

All of it is fixed when a pipeline is compiled, but for the accelerator, which is a field of the form. Runners on one
machine take no notice. Nothing here can change a result, so nothing of it is in a key or in a manifest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from reflux.components import declare

RETRIED_FOR = f"{30 * 24 * 3600}s"
"""Argo counts it from the beginning of the first attempt, ends later attempts when it is over, and begins none after
it; KFP's default of an hour would leave a training of two alone. So it is longer than any stage works."""
SHARED_MEMORY = "/dev/shm"
SHARED = ("collect_traces", "distill")
"""Tasks whose work can be shared among pods."""
TRAINED_TOGETHER = "distill"

_UNITS = {"": 1.0, "m": 1e-3} | {
    f"{letter}{i}": base**power
    for i, base in (("", 1000.0), ("i", 1024.0))
    for power, letter in enumerate("KMGTPE", start=1)
}
_CPU = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?)(?P<unit>m?)")
_BYTES = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?)(?P<unit>[KMGTPE]i?|)")
_LABEL = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_RESOURCE = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class Pod:
    """One task's wishes."""

    cpu: str = "1"
    """Processors set aside for it: 2, 0.5 or 500m."""
    cpu_limit: str = ""
    """Most processors that it may use; empty: what the node has left."""
    memory: str = "2Gi"
    """Memory set aside for it: 24Gi, 500M."""
    memory_limit: str = ""
    """Beyond it the pod is killed; empty: the same as memory, so that a node never has to choose whom to kill."""
    accelerated: bool = False
    """Whether it gets the accelerators that the form asks for."""
    shared_memory: str = ""
    """Most that /dev/shm holds, where processes of one pod exchange tensors; it counts as memory. Empty: the 64 MB that
    container engines give."""
    tolerations: list[str] = field(default_factory=list)
    """Taints of nodes that it may run on, as kubectl writes them: KEY=VALUE:EFFECT, or KEY:EFFECT for any value."""
    node_selector: list[str] = field(default_factory=list)
    """Labels that its node must have: LABEL=VALUE."""
    pods: int = 1
    """Among how many pods the work is shared; more than one: collect_traces, in parts that merge_traces joins, and
    distill, whose pods train together as a TrainJob."""
    runtime: str = "torch-distributed"
    """ClusterTrainingRuntime of Kubeflow Trainer, where pods train together: taints, labels and volumes are its own."""
    retries: int = 0
    """How often it is begun again after it failed or was evicted. A stage goes on from its shards and checkpoints."""
    retry_after_s: int = 60
    """Wait before the first of these, seconds; each further one waits twice as long."""

    def __post_init__(self) -> None:
        cpu, memory = _amount("cpu", self.cpu, _CPU), _amount("memory", self.memory, _BYTES)
        for name, pattern, least in (("cpu_limit", _CPU, cpu), ("memory_limit", _BYTES, memory)):
            limit = getattr(self, name)
            if limit and _amount(name, limit, pattern) < least:
                asked = name.removesuffix("_limit")
                raise ValueError(f"pod.{name} {limit!r}: must be at least {asked}, which is {getattr(self, asked)!r}")
        if self.shared_memory:
            _amount("shared_memory", self.shared_memory, _BYTES)
        for text in self.tolerations:
            toleration(text)
        for text in self.node_selector:
            _label(text)
        if self.pods < 1:
            raise ValueError(f"pod.pods {self.pods}: must be at least 1")
        if self.retries < 0 or self.retry_after_s < 1:
            raise ValueError(
                f"pod.retries {self.retries}, retry_after_s {self.retry_after_s}: must be at least 0 and at least 1"
            )


@dataclass(frozen=True, kw_only=True)
class Placement:
    """All tasks of one pipeline: what they ask for, and the two inputs of the pipeline that name accelerators."""

    pods: Mapping[str, Pod]
    accelerator: Any
    """Kubernetes' name of the resource, "" for none. A KFP input; so is the next, and text too: KFP's driver reads
    nothing else where a resource is decided by an input."""
    accelerators: Any

    def place(self, name: str, task: Any) -> None:
        """Give KFP's task of that name what its pod asks for."""
        from kfp import kubernetes

        pod = self.pods[name]
        if self.train_job(name, ""):
            pod = replace(_WATCHES, retries=pod.retries, retry_after_s=pod.retry_after_s)
        task.set_cpu_request(pod.cpu)
        if pod.cpu_limit:
            task.set_cpu_limit(pod.cpu_limit)
        task.set_memory_request(pod.memory)
        task.set_memory_limit(pod.memory_limit or pod.memory)
        if pod.accelerated:
            task.set_accelerator_type(self.accelerator).set_accelerator_limit(self.accelerators)
        if pod.shared_memory:
            kubernetes.empty_dir_mount(
                task,
                volume_name="shared-memory",
                mount_path=SHARED_MEMORY,
                medium="Memory",
                size_limit=pod.shared_memory,
            )
        for text in pod.tolerations:
            kubernetes.add_toleration(task, **toleration(text))
        for text in pod.node_selector:
            kubernetes.add_node_selector(task, *_label(text))
        if pod.retries:
            task.set_retry(
                pod.retries,
                backoff_duration=f"{pod.retry_after_s}s",
                backoff_factor=2.0,
                backoff_max_duration=RETRIED_FOR,
            )

    def train_job(self, name: str, image: str) -> dict[str, Any]:
        """The inputs of a task whose work several pods do together; {} if one does it. `image` is theirs."""
        pod = self.pods[name]
        if pod.pods == 1 or name != TRAINED_TOGETHER:
            return {}
        asked = {
            "nodes": pod.pods, "runtime": pod.runtime, "image": image or declare.IMAGE, "cpu": pod.cpu,
            "cpu_limit": pod.cpu_limit, "memory": pod.memory, "memory_limit": pod.memory_limit or pod.memory,
        }  # fmt: skip
        return {"train_job": asked, "accelerator": self.accelerator, "accelerators": self.accelerators}


def changed(pods: Mapping[str, Pod], table: Any) -> dict[str, Pod]:
    """The pods with fields replaced, {task: {field: value}}. ValueError names task, field, value and what is right."""
    if not isinstance(table, Mapping):
        raise ValueError(f"kubernetes: a table for each task is expected, not {table!r}")
    made = dict(pods)
    for name, fields in table.items():
        if name not in pods:
            near = declare.nearest(name, pods)
            raise ValueError(f"kubernetes.{name}: no such task; did you mean {near}? Known: {', '.join(pods)}")
        if not isinstance(fields, Mapping):
            raise ValueError(f"kubernetes.{name}: a table of fields is expected, not {fields!r}")
        try:
            made[name] = declare.from_mapping(Pod, {**asdict(pods[name]), **fields})
        except ValueError as error:
            raise ValueError(f"kubernetes.{name}.{str(error).removeprefix('pod.')}") from None
        if made[name].pods > 1 and name == TRAINED_TOGETHER:
            _require_no_own_place(name, made[name])
        if made[name].pods > 1 and name not in SHARED:
            raise ValueError(
                f"kubernetes.{name}.pods {made[name].pods}: works in one pod; more are allowed for {', '.join(SHARED)}"
            )
    return made


def _require_no_own_place(name: str, pod: Pod) -> None:
    """What a TrainJob says in another way in each version of Trainer is not dropped in silence."""
    for field_name in ("node_selector", "shared_memory", "tolerations"):
        value = getattr(pod, field_name)
        if value and value != getattr(DEFAULTS[name], field_name):
            raise ValueError(
                f"kubernetes.{name}.{field_name} {value!r}: with {pod.pods} pods it belongs into the "
                f"ClusterTrainingRuntime {pod.runtime}"
            )


def toleration(text: str) -> dict[str, str]:
    """The fields of a Kubernetes toleration."""
    taint, colon, effect = text.rpartition(":")
    key, equals, value = taint.partition("=")
    if not colon or effect not in _EFFECTS or not _LABEL.fullmatch(key) or (equals and not _LABEL.fullmatch(value)):
        allowed = f"KEY=VALUE:EFFECT or KEY:EFFECT, EFFECT one of {', '.join(_EFFECTS)}"
        raise ValueError(f"pod.tolerations {text!r}: write {allowed}")
    return {"key": key, "effect": effect} | (
        {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
    )


def check_accelerators(accelerator: str, accelerators: str) -> None:
    """ValueError unless Kubernetes could read the form's two fields; "" for the first asks for none."""
    if accelerator and not _RESOURCE.fullmatch(accelerator):
        raise ValueError(
            f"accelerator {accelerator!r}: Kubernetes' name of a resource is expected, e.g. nvidia.com/gpu"
        )
    if not re.fullmatch("[0-9]+", accelerators):
        raise ValueError(f"accelerators {accelerators!r}: a whole number for each pod is expected")


def _amount(name: str, text: str, pattern: re.Pattern[str]) -> float:
    match = pattern.fullmatch(text)
    if not match or not float(match["number"]):
        example = "2, 0.5 or 500m" if pattern is _CPU else "24Gi or 500M"
        raise ValueError(f"pod.{name} {text!r}: an amount as Kubernetes writes it is expected, such as {example}")
    return float(match["number"]) * _UNITS[match["unit"]]


def _label(text: str) -> tuple[str, str]:
    label, equals, value = text.partition("=")
    if not equals or not _LABEL.fullmatch(label) or not _LABEL.fullmatch(value):
        raise ValueError(f"pod.node_selector {text!r}: write LABEL=VALUE")
    return label, value


_MODEL = Pod(cpu="2", memory="8Gi", accelerated=True, tolerations=["nvidia.com/gpu:NoSchedule"], retries=3)
DEFAULTS: Mapping[str, Pod] = {
    "prerequisites": Pod(),  # a wrong input is told at once, so it is not tried again
    "collect_traces": _MODEL,
    "merge_traces": Pod(retries=3),
    "profile_kv": _MODEL,
    "ingest_labels": Pod(retries=3),
    "distill": replace(_MODEL, cpu="4", memory="16Gi"),
    "calibrate": Pod(memory="8Gi", retries=3),
    "evaluate": _MODEL,
    "close_run": Pod(cpu="250m", memory="1Gi"),
}
"""Task -> what it asks for."""
_WATCHES = Pod(memory="4Gi")
"""A task that only watches a job. It reads the models once, for their digests."""
