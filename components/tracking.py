"""What MLflow shows of a run: one parent run per pipeline run, one nested run per stage, however often it is retried.

MLflow's fluent API keeps the current run in globals and in MLFLOW_RUN_ID, which nests wrongly under retries; here every
call names its run. MLflow gives no run ids of our choice, so a run is found by its tags or made. Off, and MLflow not
imported, while MLFLOW_TRACKING_URI is unset.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reflux.components.artifacts import Artifact
from reflux.components.progress import MetricPoint
from reflux.components.provenance import public_uri
from reflux.components.s3_settings import S3Settings
from reflux.components.sources import Source

EXPERIMENT = "reflux"
"""Name of the experiment; MLFLOW_EXPERIMENT_NAME overrides it."""

_DIGEST_CHARACTERS = 36  # MLflow's limit for a dataset's digest; the whole digest stands in a tag of the input
_METRICS_PER_CALL = 1000  # MLflow's limit
_PARAMS_PER_CALL = 100  # MLflow's limit


def enabled() -> bool:
    return bool(os.environ.get("MLFLOW_TRACKING_URI"))


def begin_pipeline(run: str, params: Mapping[str, Any]) -> str | None:
    """Find or make the parent run of pipeline run `run`, mark it running; its MLflow id, None when tracking is off."""
    if not enabled():
        return None
    client, experiment = _connect()
    parent = _parent(client, experiment, run)
    client.update_run(parent.info.run_id, status="RUNNING")
    _log_params(client, parent, params)
    return parent.info.run_id


def end_pipeline(
    run: str, *, status: str, verdict: str = "", root: str = "", metrics: Mapping[str, float] | None = None,
    report: Path | None = None,
) -> None:  # fmt: skip
    """Close the parent run: status FINISHED, FAILED or KILLED, the gate's verdict, the root digest, the report page."""
    if not enabled():
        return
    client, experiment = _connect()
    parent = _parent(client, experiment, run)
    run_id = parent.info.run_id
    for tag, value in {"reflux.verdict": verdict, "reflux.root": root}.items():
        if value:
            client.set_tag(run_id, tag, value)
    _log_final_metrics(client, parent, metrics or {}, step=0)
    if report is not None:
        client.log_artifact(run_id, str(report))
    client.set_terminated(run_id, status=status)


@contextmanager
def stage_run(
    stage: str, run: str, *, key: str, params: Mapping[str, Any], parents: Mapping[str, Artifact],
    sources: Mapping[str, Source],
) -> Iterator[StageRun | None]:  # fmt: skip
    """The nested run of one stage, for the time the stage takes; None when tracking is off.

    A retry, which has the same key, continues the run of the attempt before it. An exception marks the run as FAILED.
    """
    if not enabled():
        print("tracking: off, because MLFLOW_TRACKING_URI is not set", flush=True)
        yield None
        return
    client, experiment = _connect()
    parent = _parent(client, experiment, run)
    tags = {"reflux.run": run, "reflux.stage": stage, "reflux.key": key}
    found = _find(client, experiment, tags)
    nested = found or client.create_run(
        experiment, run_name=stage, tags={**tags, "mlflow.parentRunId": parent.info.run_id}
    )
    run_id = nested.info.run_id
    finished = nested.info.status == "FINISHED"
    client.update_run(run_id, status="RUNNING")
    _log_params(client, nested, params)
    _log_inputs(client, run_id, parents, sources)
    try:
        yield StageRun(client=client, experiment=experiment, run_id=run_id, finished_before=finished)
    except BaseException as error:
        with suppress(Exception):  # the stage's own error is the one to see
            client.set_terminated(run_id, status="FAILED" if isinstance(error, Exception) else "KILLED")
        raise
    client.set_terminated(run_id, status="FINISHED")


@dataclass(kw_only=True)
class StageRun:
    """A stage's run while it is open. `publish` is a listener of progress.listening."""

    client: Any
    experiment: str
    run_id: str
    finished_before: bool
    last_step: int = 0
    waiting: list[MetricPoint] = field(default_factory=list)

    def publish(self, points: list[MetricPoint]) -> None:
        """Log points. MLflow drops a point that repeats step, time and value, so a resumed stage may publish again.

        A server that is away does not stop the training: its points wait for the next call, at the latest `finish`.
        """
        self.waiting += points
        try:
            self._log_waiting()
        except Exception as error:  # MLflow raises its own, requests' and its database's errors
            print(f"tracking: {len(self.waiting)} points wait, MLflow does not answer ({_line(error)})", flush=True)

    def finish(self, artifact: Artifact, *, reused: bool, pages: Mapping[str, bytes]) -> None:
        """What the stage came to: final metrics, digest and key, pages by file name; where it was made, if reused."""
        self._log_waiting()
        tags = {"reflux.digest": artifact.digest, "reflux.artifact": artifact.uri}
        if reused and not self.finished_before:
            tags["reused_from"] = self._origin(artifact)
        for tag, value in tags.items():
            self.client.set_tag(self.run_id, tag, value)
        nested = self.client.get_run(self.run_id)
        _log_final_metrics(self.client, nested, artifact.metrics, step=self.last_step)
        with tempfile.TemporaryDirectory() as folder:
            for name, page in pages.items():
                path = Path(folder, name)
                path.write_bytes(page)
                self.client.log_artifact(self.run_id, str(path))

    def _log_waiting(self) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(key=name, value=value, timestamp=point.time_ms, step=point.step)
            for point in self.waiting
            for name, value in point.values.items()
        ]
        for start in range(0, len(metrics), _METRICS_PER_CALL):
            self.client.log_batch(self.run_id, metrics=metrics[start : start + _METRICS_PER_CALL])
        self.last_step = max([self.last_step, *(point.step for point in self.waiting)])
        self.waiting.clear()

    def _origin(self, artifact: Artifact) -> str:
        """The MLflow run that made the artifact, or the artifact itself where this server did not see it made."""
        made = self.client.search_runs(
            [self.experiment],
            filter_string=_filter({"reflux.digest": artifact.digest, "reflux.key": artifact.key}),
            order_by=["attributes.start_time ASC"],
            max_results=1,
        )
        return made[0].info.run_id if made else artifact.uri


def _connect() -> tuple[Any, str]:
    """A client and the experiment's id. ConnectionError if MLflow cannot be reached."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    for variable, value in S3Settings.from_env().mlflow_env().items():  # for artifacts that MLflow puts into S3 itself
        if variable.startswith("MLFLOW_"):
            os.environ.setdefault(variable, value)
    uri = os.environ["MLFLOW_TRACKING_URI"]
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
    try:
        client = MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name(name)
        if experiment is not None:
            return client, experiment.experiment_id
        try:
            return client, client.create_experiment(name, artifact_location=_artifact_folder(uri))
        except MlflowException:  # another stage was faster
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
            return client, experiment.experiment_id
    except Exception as error:
        raise ConnectionError(
            f"MLFLOW_TRACKING_URI {public_uri(uri)}: MLflow cannot be used ({_line(error)})"
        ) from error


def _artifact_folder(tracking_uri: str) -> str | None:
    """mlartifacts/ beside a sqlite file, where MLflow would take the working directory. A server has its own place."""
    if not tracking_uri.startswith("sqlite:///"):
        return None
    return (Path(tracking_uri.removeprefix("sqlite:///")).absolute().parent / "mlartifacts").as_uri()


def _parent(client: Any, experiment: str, run: str) -> Any:
    tags = {"reflux.run": run, "reflux.role": "pipeline"}
    return _find(client, experiment, tags) or client.create_run(experiment, run_name=run, tags=tags)


def _find(client: Any, experiment: str, tags: Mapping[str, str]) -> Any:
    """The oldest run with these tags, or None: of two that raced to make it, everybody continues the same one."""
    found = client.search_runs(
        [experiment], filter_string=_filter(tags), order_by=["attributes.start_time ASC"], max_results=1
    )
    return found[0] if found else None


def _filter(tags: Mapping[str, str]) -> str:
    for name, value in tags.items():
        if "'" in value:
            raise ValueError(
                f"{name} {value!r}: a quote cannot be searched for in MLflow; use letters, digits, - and _"
            )
    return " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())


def _log_params(client: Any, run: Any, params: Mapping[str, Any]) -> None:
    """Log parameters. MLflow's cannot change: a setting that differs in a retry is kept beside them, as a tag."""
    from mlflow.entities import Param, RunTag

    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in params.items()}
    texts = {name: public_uri(text) for name, text in texts.items()}
    new = [Param(name, text) for name, text in texts.items() if name not in run.data.params]
    changed = [
        RunTag(f"reflux.retried_with.{name}", text)
        for name, text in texts.items()
        if run.data.params.get(name, text) != text
    ]
    for start in range(0, max(len(new), len(changed)), _PARAMS_PER_CALL):
        chosen = slice(start, start + _PARAMS_PER_CALL)
        client.log_batch(run.info.run_id, params=new[chosen], tags=changed[chosen])


def _log_inputs(client: Any, run_id: str, parents: Mapping[str, Artifact], sources: Mapping[str, Source]) -> None:
    """Parents and sources as datasets with digests; MLflow keeps one of those that it has seen."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    inputs = {name: (artifact.digest, artifact.uri) for name, artifact in parents.items()}
    inputs |= {name: (source.digest, public_uri(source.uri)) for name, source in sources.items()}
    datasets = [
        DatasetInput(
            Dataset(
                name=name,
                digest=digest.removeprefix("sha256:")[:_DIGEST_CHARACTERS],
                source_type="s3" if uri.startswith("s3://") else "local",
                source=json.dumps({"uri": uri}),
            ),
            [InputTag("mlflow.data.context", name), InputTag("reflux.digest", digest)],
        )
        for name, (digest, uri) in inputs.items()
    ]
    if datasets:
        client.log_inputs(run_id, datasets=datasets)


def _log_final_metrics(client: Any, run: Any, metrics: Mapping[str, float], *, step: int) -> None:
    """Metrics of the whole stage, once: a value that the run already shows is not logged at a second time."""
    from mlflow.entities import Metric

    now_ms = time.time_ns() // 1_000_000
    new = [Metric(name, value, now_ms, step) for name, value in metrics.items() if run.data.metrics.get(name) != value]
    for start in range(0, len(new), _METRICS_PER_CALL):
        client.log_batch(run.info.run_id, metrics=new[start : start + _METRICS_PER_CALL])


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
