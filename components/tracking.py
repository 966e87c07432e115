"""What MLflow shows of a run: one parent run per pipeline run, one nested run per stage, however often it is retried.

MLflow's fluent API keeps the current run in globals and in MLFLOW_RUN_ID, which nests wrongly under retries; here every
call names its run. Which runs those are, and whether Kubeflow's plugin made them, run_tree.py knows. Off, and MLflow
not imported, while MLFLOW_TRACKING_URI is unset.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reflux.components import run_tree, tracked_values
from reflux.components.artifacts import Artifact
from reflux.components.mlflow_connection import answering, connect, enabled, line, run_url
from reflux.components.progress import MetricPoint
from reflux.components.sources import Source
from reflux.components.storage import Store

EXPERIMENT = "reflux"
"""Name of the experiment for runs that Kubeflow's plugin has not begun; MLFLOW_EXPERIMENT_NAME overrides it."""

_ATTEMPT = "reflux.attempt"


@answering()
def begin_pipeline(run: str, params: Mapping[str, Any], *, store: Store, job: str = "") -> str | None:
    """Find or make the parent run of pipeline run `run`, mark it running; its MLflow id, None when tracking is off.

    `job` is the id that Kubeflow gave the run, "" elsewhere. ConnectionError if MLflow cannot be used.
    """
    if not enabled():
        return None
    client = connect()
    parent = run_tree.parent(client, lambda: _experiment(client), store, run, job)
    client.update_run(parent.info.run_id, status="RUNNING")
    tracked_values.log_params(client, parent.info.run_id, params)
    return parent.info.run_id


@answering()
def end_pipeline(
    run: str, *, status: str, job: str = "", verdict: str = "", root: str = "", report: Path | None = None
) -> None:
    """Close the parent run: status FINISHED, FAILED or KILLED, the gate's verdict, the root digest, the report page."""
    if not enabled():
        return
    client = connect()
    parent = run_tree.find_parent(client, _known_experiment(client), run, job)
    if parent is None:
        print(f"tracking: MLflow has no run {run}, so there is nothing to close", flush=True)
        return
    run_id = parent.info.run_id
    said = {"reflux.verdict": verdict, "reflux.root": root}
    run_tree.set_tags(client, run_id, {tag: value for tag, value in said.items() if value})
    if report is not None:
        client.log_artifact(run_id, str(report))
    if status != "FINISHED":  # a stage that was killed at once could not say so
        for stage in run_tree.stages_below(client, parent):
            if stage.info.status == "RUNNING":
                client.set_terminated(stage.info.run_id, status=status)
    client.set_terminated(run_id, status=status)


@answering()
def how_it_ended(run: str, job: str, *, failed: bool) -> str:
    """FINISHED, FAILED or KILLED, from what the stages of a run that is over have left in MLflow; not FINISHED if it is
    known that it `failed`.
    """
    client = connect()
    parent = run_tree.find_parent(client, _known_experiment(client), run, job)
    if parent is None:
        return "FAILED"
    if "reflux.root" in parent.data.tags and not failed:
        return "FINISHED"
    statuses = {stage.info.status for stage in run_tree.stages_below(client, parent)}
    return "KILLED" if "KILLED" in statuses and "FAILED" not in statuses else "FAILED"


@contextmanager
def stage_run(
    stage: str, run: str, *, key: str, params: Mapping[str, Any], parents: Mapping[str, Artifact],
    sources: Mapping[str, Source], store: Store, job: str = "",
) -> Iterator[StageRun | None]:  # fmt: skip
    """The nested run of one stage, for the time the stage takes; None when tracking is off.

    A retry, which has the same key, takes over the run of the attempt before it, even if that one still lives. An
    exception marks the run as FAILED, an interruption as KILLED.
    """
    if not enabled():
        print("tracking: off, because MLFLOW_TRACKING_URI is not set", flush=True)
        yield None
        return
    with answering():
        tracked = _begun(stage, run, job, store, key)
        if not tracked.opened_by_kfp:
            tracked_values.log_params(tracked.client, tracked.run_id, params)
        tracked_values.log_inputs(tracked.client, tracked.run_id, parents, sources)
    try:
        yield tracked
    except BaseException as error:
        with suppress(Exception):  # the stage's own error is the one to see
            tracked.close("FAILED" if isinstance(error, Exception) else "KILLED")
        raise
    tracked.close("FINISHED")


def _begun(stage: str, run: str, job: str, store: Store, key: str) -> StageRun:
    client = connect()
    parent = run_tree.parent(client, lambda: _experiment(client), store, run, job)
    if parent.info.status in ("FAILED", "KILLED"):
        client.update_run(parent.info.run_id, status="RUNNING")
    nested = run_tree.nested(client, parent, store, stage=stage, run=run, key=key, job=job)
    tracked = StageRun(
        client=client,
        experiment=parent.info.experiment_id,
        parent_id=parent.info.run_id,
        run_id=nested.info.run_id,
        opened_by_kfp=run_tree.opened_by_kfp(nested),
        finished_before=nested.info.status == "FINISHED",
    )
    run_tree.set_tags(
        client, tracked.run_id, {_ATTEMPT: tracked.attempt}
    )  # before it looks for a checkpoint: `publish`
    client.update_run(tracked.run_id, status="RUNNING")
    return tracked


@dataclass(kw_only=True)
class StageRun:
    """A stage's run while it is open. `publish` is a listener of progress.listening."""

    client: Any
    experiment: str
    parent_id: str
    run_id: str
    opened_by_kfp: bool
    finished_before: bool
    attempt: str = field(default_factory=lambda: uuid.uuid4().hex)
    taken_over: bool = False
    logged: int = 0
    """Points that were published and do not wait."""
    waiting: list[MetricPoint] = field(default_factory=list)

    def publish(self, points: list[MetricPoint]) -> None:
        """Log points. What the run has is not logged again, so a resumed stage may publish all from the first.

        The last attempt to begin is the one that logs. It began before it looked for a checkpoint, and points are
        published after a checkpoint holds them; so what an earlier attempt still logs are points that the last one
        found in its checkpoint. A server that is away does not stop the training: its points wait for the next call, at
        the latest `finish`.
        """
        self.waiting += points
        try:
            tags = self.client.get_run(self.run_id).data.tags
            if self._is_mine(tags):
                self._log_waiting(tags)
        except Exception as error:  # MLflow raises its own, requests' and its database's errors
            print(f"tracking: {len(self.waiting)} points wait, MLflow does not answer ({line(error)})", flush=True)

    @answering()
    def finish(self, artifact: Artifact, *, reused: bool, pages: Mapping[str, bytes]) -> None:
        """What the stage came to: final metrics, digest and key, pages by file name; where it was made, if reused.

        An attempt that was taken over says so too: the other one may find this artifact, and then has no points.
        """
        if self.waiting:
            self._log_waiting(self.client.get_run(self.run_id).data.tags)
        tags = {"reflux.digest": artifact.digest, "reflux.artifact": artifact.uri}
        origin = self._origin(artifact) if reused and not self.finished_before else self.run_id
        if origin != self.run_id:  # else another attempt at this stage made it
            tags["reused_from"] = origin
        run_tree.set_tags(self.client, self.run_id, tags)
        if not self.opened_by_kfp:
            tracked_values.log_final_metrics(self.client, self.run_id, artifact)
        with tempfile.TemporaryDirectory() as folder:
            for name, page in pages.items():
                path = Path(folder, name)
                path.write_bytes(page)
                self.client.log_artifact(self.run_id, str(path))

    @answering()
    def close(self, status: str) -> None:
        """Mark it as ended, unless it goes on in another attempt."""
        if self._is_mine(self.client.get_run(self.run_id).data.tags):
            self.client.set_terminated(self.run_id, status=status)

    @property
    def url(self) -> str:
        """The run's page, "" where no server shows it."""
        return run_url(self.experiment, self.run_id)

    def _log_waiting(self, tags: Mapping[str, str]) -> None:
        tracked_values.log_points(self.client, self.run_id, self.waiting, first=self.logged, tags=tags)
        self.logged += len(self.waiting)
        self.waiting.clear()

    def _is_mine(self, tags: Mapping[str, str]) -> bool:
        if not self.taken_over and tags.get(_ATTEMPT) != self.attempt:
            print("tracking: another attempt at this stage has begun, and logs from here on", flush=True)
            self.taken_over = True
        return not self.taken_over

    def _origin(self, artifact: Artifact) -> str:
        """The MLflow run that made the artifact, or the artifact itself where this server did not see it made."""
        made = self.client.search_runs(
            [self.experiment],
            filter_string=run_tree.query({"reflux.digest": artifact.digest, "reflux.key": artifact.key}),
            order_by=["attributes.start_time ASC"],
            max_results=1,
        )
        return made[0].info.run_id if made else artifact.uri


def _known_experiment(client: Any) -> str | None:
    experiment = client.get_experiment_by_name(os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT))
    return experiment.experiment_id if experiment else None


def _experiment(client: Any) -> str:
    """The id of the experiment for our own runs, which is made if it is missing."""
    from mlflow.exceptions import MlflowException

    known = _known_experiment(client)
    if known is not None:
        return known
    try:
        return client.create_experiment(
            os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT),
            artifact_location=_artifact_folder(os.environ["MLFLOW_TRACKING_URI"]),
        )
    except MlflowException:  # another stage was faster
        known = _known_experiment(client)
        if known is None:
            raise
        return known


def _artifact_folder(tracking_uri: str) -> str | None:
    """mlartifacts/ beside a sqlite file, where MLflow would take the working directory. A server has its own place."""
    if not tracking_uri.startswith("sqlite:///"):
        return None
    return (Path(tracking_uri.removeprefix("sqlite:///")).absolute().parent / "mlartifacts").as_uri()
