"""What the contract test's server keeps, and the rules of the API that its generated client does not know.

Read from the API server's source (backend/src/apiserver, KFP 2.17): names are unique, arguments must be the pipeline's
inputs in their types, a schedule without a version runs the newest one, deleting a schedule ends its runs unless they
are orphaned. Runs move on by one step of `script` each time somebody looks at them; nothing is executed.
"""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import yaml
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2

GRPC_CODES = {400: 3, 401: 16, 403: 7, 404: 5, 409: 6, 429: 8, 500: 13, 503: 14}
FILTERED = {
    "pipelines": {"display_name", "name", "id"},
    "pipeline_versions": {"display_name", "name", "pipeline_version_id"},
    "experiments": {"display_name", "name", "experiment_id"},
    "runs": {"display_name", "run_id", "state"},  # not recurring_run_id: the database has no column of that name
    "recurringRuns": {"display_name", "recurring_run_id", "pipeline_id"},
}
SORTED = {"created_at", "display_name", "name", ""}
JSON_TYPES: dict[str, Any] = {
    "STRING": str, "NUMBER_INTEGER": int | float, "NUMBER_DOUBLE": int | float, "BOOLEAN": bool, "LIST": list,
    "STRUCT": dict,
}  # fmt: skip
SUCCEEDS = [
    {"run": "PENDING"},
    {"run": "RUNNING", "brew": "RUNNING"},
    {"run": "RUNNING", "brew": "SUCCEEDED", "pour": "RUNNING"},
    {"run": "SUCCEEDED", "brew": "SUCCEEDED", "pour": "SUCCEEDED"},
]


class DeniedError(Exception):
    """An answer with an HTTP status other than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(kw_only=True)
class State:
    """Everything by id. `page_cap` keeps pages small, so that who lists has to turn them."""

    multi_user: bool = False
    page_cap: int = 2
    script: list[dict[str, str]] = field(default_factory=lambda: [dict(step) for step in SUCCEEDS])
    """States at each look at a run: its own under "run", those of tasks under their names."""
    reason: str = ""
    """The error of tasks that fail."""
    pipelines: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, dict[str, Any]] = field(default_factory=dict)
    experiments: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    recurring: dict[str, dict[str, Any]] = field(default_factory=dict)
    looks: dict[str, int] = field(default_factory=dict)
    clock: Any = field(default_factory=lambda: itertools.count())

    def serve(self, operation: str, ids: dict[str, str], query: dict[str, str], body: Any) -> dict[str, Any]:
        """The answer to one operation of the generated client. DeniedError with the API's status and message."""
        return OPERATIONS[operation](self, ids, query, body)

    def start_scheduled(self, recurring_run_id: str, name: str) -> str:
        """What the cluster's scheduler does when the time has come: the id of the new run."""
        schedule = self.recurring[recurring_run_id]
        reference = {"pipeline_id": schedule["pipeline_version_reference"]["pipeline_id"]}
        body = {key: schedule[key] for key in ("experiment_id", "runtime_config")}
        run = self._run({**body, "display_name": name, "pipeline_version_reference": reference})
        run["recurring_run_id"] = recurring_run_id
        return str(run["run_id"])

    def _now(self) -> str:
        """A second later than the last thing that was made, so that the newest is known."""
        return f"{datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=next(self.clock)):%Y-%m-%dT%H:%M:%SZ}"

    def _namespace(self, given: str) -> dict[str, str]:
        if self.multi_user and not given:
            raise DeniedError(400, "Invalid input error: namespace cannot be empty in multi-user mode")
        return {"namespace": given} if self.multi_user else {}

    def _newest(self, pipeline_id: str) -> dict[str, Any]:
        own = [each for each in self.versions.values() if each["pipeline_id"] == pipeline_id]
        if not own:
            raise DeniedError(404, f"Failed to fetch a pipeline version from pipeline {pipeline_id}: not found")
        return max(own, key=lambda each: str(each["created_at"]))

    def _run(self, body: dict[str, Any]) -> dict[str, Any]:
        reference = body["pipeline_version_reference"]
        version = self.versions.get(reference.get("pipeline_version_id", "")) or self._newest(reference["pipeline_id"])
        _check_arguments(version["pipeline_spec"], body.get("runtime_config", {}).get("parameters") or {})
        reference = {"pipeline_id": version["pipeline_id"], "pipeline_version_id": version["pipeline_version_id"]}
        run_id = str(uuid.uuid4())
        made = {"run_id": run_id, "created_at": self._now(), "state": "PENDING", "storage_state": "AVAILABLE"}
        self.runs[run_id] = {**body, **made, "pipeline_version_reference": reference}
        return self.runs[run_id]


def _healthz(state: State, ids: Any, query: Any, body: Any) -> dict[str, Any]:
    return {"multi_user": state.multi_user, "pipeline_store": "database"}


def _create_pipeline(state: State, ids: Any, query: Any, body: Any) -> dict[str, Any]:
    _unique(state.pipelines, body.get("display_name", ""), "pipeline")
    made = {**body, **state._namespace(body.get("namespace", "")), "pipeline_id": str(uuid.uuid4())}
    state.pipelines[made["pipeline_id"]] = made | {"created_at": state._now()}
    return state.pipelines[made["pipeline_id"]]


def _upload_version(state: State, ids: Any, query: dict[str, str], body: str) -> dict[str, Any]:
    pipeline_id = query.get("pipelineid", "")
    if pipeline_id not in state.pipelines:
        raise DeniedError(400, "Failed to create a pipeline version")
    own = {key: each for key, each in state.versions.items() if each["pipeline_id"] == pipeline_id}
    _unique(own, query["name"], "pipeline version")
    try:
        spec, *platform = yaml.safe_load_all(body)
        json_format.ParseDict(spec, pipeline_spec_pb2.PipelineSpec())
    except (yaml.YAMLError, json_format.ParseError) as error:
        raise DeniedError(400, f"Failed to create a pipeline version: {error}") from None
    made = {"pipeline_id": pipeline_id, "pipeline_version_id": str(uuid.uuid4()), "display_name": query["name"]}
    both = {"pipeline_spec": spec, "platform_spec": platform[0]} if platform else spec
    state.versions[made["pipeline_version_id"]] = {**made, "created_at": state._now(), "pipeline_spec": both}
    return state.versions[made["pipeline_version_id"]]


def _create_experiment(state: State, ids: Any, query: Any, body: Any) -> dict[str, Any]:
    _unique(state.experiments, body.get("display_name", ""), "experiment")
    made = {**body, **state._namespace(body.get("namespace", "")), "experiment_id": str(uuid.uuid4())}
    state.experiments[made["experiment_id"]] = made | {"created_at": state._now()}
    return state.experiments[made["experiment_id"]]


def _create_run(state: State, ids: Any, query: Any, body: Any) -> dict[str, Any]:
    _get(state.experiments, body.get("experiment_id", ""), "experiment")
    if not body.get("display_name"):
        raise DeniedError(400, "Invalid input error: Run name is empty. Please specify a valid name")
    return state._run(body)


def _get_run(state: State, ids: dict[str, str], query: Any, body: Any) -> dict[str, Any]:
    run = _get(state.runs, ids["run_id"], "run")
    look = state.looks[ids["run_id"]] = state.looks.get(ids["run_id"], -1) + 1
    step = state.script[min(look, len(state.script) - 1)]
    run["state"] = step["run"]
    run["run_details"] = {"task_details": _tasks(run, step, state.reason)}
    if run["state"] == "FAILED":
        run["error"] = {"code": 13, "message": "This step is in Failed state with this message: child failed"}
    return run


def _tasks(run: dict[str, Any], step: dict[str, str], reason: str) -> list[dict[str, Any]]:
    """Those of the script, and between them those that KFP lists of its own."""
    own = {f"tea-party-{run['run_id'][:5]}": step["run"], "root-driver": "SUCCEEDED", "root": step["run"]}
    tasks = {name: each for name, each in step.items() if name != "run"}
    told = []
    for number, (name, now) in enumerate(
        [*own.items(), *tasks.items(), *((f"{n}-driver", "SUCCEEDED") for n in tasks)]
    ):
        began = datetime(2026, 1, 1, 12, number, tzinfo=UTC)
        told.append(
            {"display_name": name, "task_id": f"{run['run_id']}-{name}", "run_id": run["run_id"], "state": now,
             "create_time": f"{began:%Y-%m-%dT%H:%M:%SZ}", "start_time": f"{began:%Y-%m-%dT%H:%M:%SZ}",
             "end_time": f"{began + timedelta(seconds=90):%Y-%m-%dT%H:%M:%SZ}"}
            | ({"error": {"code": 13, "message": reason}} if now == "FAILED" and reason else {})
        )  # fmt: skip
    return told


def _create_recurring(state: State, ids: Any, query: Any, body: Any) -> dict[str, Any]:
    _get(state.experiments, body.get("experiment_id", ""), "experiment")
    if not 1 <= int(body.get("max_concurrency", 0)) <= 10:
        raise DeniedError(
            400, "Invalid input error: The max concurrency of the recurring run is out of range. Support 1-10."
        )
    if len(body["trigger"]["cron_schedule"]["cron"].split()) not in (5, 6):
        raise DeniedError(400, "Invalid input error: Schedule cron is not a supported format")
    reference = body["pipeline_version_reference"]
    _get(state.pipelines, reference.get("pipeline_id", ""), "pipeline")
    version = state.versions.get(reference.get("pipeline_version_id", "")) or state._newest(reference["pipeline_id"])
    _check_arguments(version["pipeline_spec"], body.get("runtime_config", {}).get("parameters") or {})
    made = {**body, "recurring_run_id": str(uuid.uuid4()), "created_at": state._now()}
    made["status"] = "ENABLED" if body.get("mode") == "ENABLE" else "DISABLED"
    made["max_concurrency"] = str(body["max_concurrency"])
    if not any(made.get("runtime_config", {}).values()):
        made.pop("runtime_config", None)
    state.recurring[made["recurring_run_id"]] = made
    return made


def _switch(on: bool) -> Callable[..., dict[str, Any]]:
    def switch(state: State, ids: dict[str, str], query: Any, body: Any) -> dict[str, Any]:
        found = _get(state.recurring, ids["recurring_run_id"], "recurring run")
        found |= {"status": "ENABLED" if on else "DISABLED", "mode": "ENABLE" if on else "DISABLE"}
        return {}

    return switch


def _delete_recurring(state: State, ids: dict[str, str], query: dict[str, str], body: Any) -> dict[str, Any]:
    _get(state.recurring, ids["recurring_run_id"], "recurring run")
    if query.get("propagation_policy", "") not in ("", "FOREGROUND", "BACKGROUND", "ORPHAN"):
        raise DeniedError(400, "propagation_policy: not a value of the enum")
    del state.recurring[ids["recurring_run_id"]]
    for run in state.runs.values():
        mine = run.get("recurring_run_id") == ids["recurring_run_id"]
        if mine and run["state"] in ("PENDING", "RUNNING") and query.get("propagation_policy") != "ORPHAN":
            run["state"] = "FAILED"  # Kubernetes removes what the schedule owns
    return {}


def _listing(field_name: str, table: str) -> Callable[..., dict[str, Any]]:
    def listed(state: State, ids: dict[str, str], query: dict[str, str], body: Any) -> dict[str, Any]:
        key, _, order = query.get("sort_by", "").partition(" ")
        if key not in SORTED or order not in ("", "asc", "desc"):
            raise DeniedError(400, f"Invalid input error: Invalid sorting field: {query['sort_by']}")
        rows = [each for each in getattr(state, table).values() if _kept(each, field_name, query.get("filter", ""))]
        if "experiment_id" in query:
            rows = [each for each in rows if each["experiment_id"] == query["experiment_id"]]
        if "pipeline_id" in ids:
            rows = [each for each in rows if each["pipeline_id"] == ids["pipeline_id"]]
        if state.multi_user and field_name != "pipeline_versions" and "experiment_id" not in query:
            namespace = state._namespace(query.get("namespace", ""))["namespace"]
            rows = [each for each in rows if each.get("namespace", namespace) == namespace]
        rows.sort(key=lambda each: str(each.get(key or "created_at")), reverse=order == "desc")
        begin = int(query.get("page_token") or 0)
        end = begin + min(int(query.get("page_size") or 20), state.page_cap)
        more = {"next_page_token": str(end)} if end < len(rows) else {}
        return {field_name: rows[begin:end], "total_size": len(rows), **more}

    return listed


def _kept(row: dict[str, Any], field_name: str, text: str) -> bool:
    for predicate in json.loads(text)["predicates"] if text else []:
        key, value = predicate["key"], predicate.get("string_value", predicate.get("stringValue"))
        if key not in FILTERED[field_name] or predicate["operation"] not in ("EQUALS", 1) or value is None:
            raise DeniedError(400, f"Invalid input error: no support for filtering on unrecognized field {key}")
        if row.get(key) != value:
            return False
    return True


def _get_by(table: str, key: str, kind: str) -> Callable[..., dict[str, Any]]:
    return lambda state, ids, query, body: _get(getattr(state, table), ids[key], kind)


def _get(table: dict[str, dict[str, Any]], key: str, kind: str) -> dict[str, Any]:
    if key not in table:
        raise DeniedError(404, f"ResourceNotFoundError: {kind} {key} not found.")
    return table[key]


def _unique(table: dict[str, dict[str, Any]], name: str, kind: str) -> None:
    if not name or len(name) > 127:
        raise DeniedError(400, f"Invalid input error: {kind} name is empty or too long")
    if any(each["display_name"] == name for each in table.values()):
        raise DeniedError(409, f"Already exist error: The name {name} already exist. Please specify a new name")


def _check_arguments(spec: dict[str, Any], given: dict[str, Any]) -> None:
    root = spec.get("pipeline_spec", spec).get("root", {})
    inputs = root.get("inputDefinitions", {}).get("parameters", {})
    for name, definition in inputs.items():
        if name not in given:
            if "defaultValue" not in definition and not definition.get("isOptional"):
                raise DeniedError(
                    400, f"Invalid input error: parameter {name} is not optional, yet has neither default value"
                )
            continue
        kind = definition["parameterType"]
        if not isinstance(given[name], JSON_TYPES[kind]) or isinstance(given[name], bool) != (kind == "BOOLEAN"):
            raise DeniedError(400, f"Invalid input error: input parameter {name} requires type {kind}")
        if definition.get("literals") and given[name] not in definition["literals"]:
            raise DeniedError(400, f"Invalid input error: input parameter {name} is none of its literals")
    if extra := given.keys() - inputs.keys():
        raise DeniedError(
            400, f"Invalid input error: parameter(s) provided are not required by pipeline: {', '.join(extra)}"
        )


OPERATIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "healthz_service_get_healthz": _healthz,
    "pipeline_service_create_pipeline": _create_pipeline,
    "pipeline_service_list_pipelines": _listing("pipelines", "pipelines"),
    "pipeline_service_list_pipeline_versions": _listing("pipeline_versions", "versions"),
    "pipeline_service_get_pipeline_version": _get_by("versions", "pipeline_version_id", "pipeline version"),
    "upload_pipeline_version": _upload_version,
    "experiment_service_create_experiment": _create_experiment,
    "experiment_service_list_experiments": _listing("experiments", "experiments"),
    "run_service_create_run": _create_run,
    "run_service_get_run": _get_run,
    "run_service_list_runs": _listing("runs", "runs"),
    "recurring_run_service_create_recurring_run": _create_recurring,
    "recurring_run_service_list_recurring_runs": _listing("recurringRuns", "recurring"),
    "recurring_run_service_get_recurring_run": _get_by("recurring", "recurring_run_id", "recurring run"),
    "recurring_run_service_enable_recurring_run": _switch(True),
    "recurring_run_service_disable_recurring_run": _switch(False),
    "recurring_run_service_delete_recurring_run": _delete_recurring,
}
