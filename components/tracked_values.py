"""Parameters, inputs and metrics of an MLflow run, written so that writing them once more adds nothing.

MLflow keeps a parameter for ever and refuses another value, keeps one of equal inputs, and one of the metric points
that agree in name, step, time and value.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from reflux.components.artifacts import Artifact
from reflux.components.progress import MetricPoint
from reflux.components.provenance import public_uri
from reflux.components.sources import Source

_DIGEST_CHARACTERS = 36  # MLflow's limit for a dataset's digest; the whole digest stands in a tag of the input
_METRICS_PER_CALL = 1000  # MLflow's limit
_PARAMS_PER_CALL = 100  # MLflow's limit
_TRIES = 3
_POINTS, _LAST_STEP = "reflux.points", "reflux.last_step"  # how many have been logged, and the last one's step


def log_params(client: Any, run_id: str, params: Mapping[str, Any]) -> None:
    """Log parameters. A setting that differs in a retry is kept beside them, as a tag."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in params.items()}
    texts = {name: public_uri(text) for name, text in texts.items()}
    _again(lambda: _log_new_params(client, client.get_run(run_id), texts))


def _log_new_params(client: Any, run: Any, texts: Mapping[str, str]) -> None:
    from mlflow.entities import Param, RunTag

    new = [Param(name, text) for name, text in texts.items() if name not in run.data.params]
    changed = [
        RunTag(f"reflux.retried_with.{name}", text)
        for name, text in texts.items()
        if run.data.params.get(name, text) != text
    ]
    for start in range(0, max(len(new), len(changed)), _PARAMS_PER_CALL):
        chosen = slice(start, start + _PARAMS_PER_CALL)
        client.log_batch(run.info.run_id, params=new[chosen], tags=changed[chosen])


def log_inputs(client: Any, run_id: str, parents: Mapping[str, Artifact], sources: Mapping[str, Source]) -> None:
    """Parents and sources as datasets with digests."""
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
        _again(lambda: client.log_inputs(run_id, datasets=datasets))


def log_points(
    client: Any, run_id: str, points: list[MetricPoint], *, first: int, tags: Mapping[str, str]
) -> None:  # fmt: skip
    """Log points with the times that they carry. `first` is the place of the first one among all that the stage
    publishes, `tags` are the run's: what an attempt has logged is not logged again by another one, which may have
    measured other times.
    """
    new = points[max(0, int(tags.get(_POINTS, 0)) - first) :]
    if new:
        _log_metrics(client, run_id, new, {_POINTS: str(first + len(points)), _LAST_STEP: str(new[-1].step)})


def log_final_metrics(client: Any, run_id: str, artifact: Artifact) -> None:
    """Metrics of the whole stage, at the last step that the run shows, and at the time when the artifact was finished:
    both are the same for every attempt. A value that the run already shows is not logged again.
    """
    data = client.get_run(run_id).data
    finished = artifact.record.finished
    time_ms = int(datetime.fromisoformat(finished).timestamp() * 1000) if finished else time.time_ns() // 1_000_000
    new = {name: value for name, value in artifact.metrics.items() if data.metrics.get(name) != value}
    step = int(data.tags.get(_LAST_STEP, 0))
    _log_metrics(client, run_id, [MetricPoint(step=step, time_ms=time_ms, values=new)], {})


def _log_metrics(client: Any, run_id: str, points: list[MetricPoint], tags: Mapping[str, str]) -> None:
    from mlflow.entities import Metric, RunTag

    metrics = [
        Metric(key=name, value=value, timestamp=point.time_ms, step=point.step)
        for point in points
        for name, value in point.values.items()
    ]
    for start in range(0, len(metrics), _METRICS_PER_CALL):
        last = start + _METRICS_PER_CALL >= len(metrics)
        said = [RunTag(name, value) for name, value in tags.items()] if last else []
        client.log_batch(run_id, metrics=metrics[start : start + _METRICS_PER_CALL], tags=said)


def _again(write: Callable[[], None]) -> None:
    """Of two attempts that write at once both may find something missing; the one that is refused looks again."""
    from mlflow.exceptions import MlflowException

    for left in reversed(range(_TRIES)):
        try:
            return write()
        except MlflowException:
            if not left:
                raise
