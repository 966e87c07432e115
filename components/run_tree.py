"""Which MLflow runs a pipeline run consists of: one parent, and one nested run for every stage, whoever made them.

Kubeflow Pipelines 2.17 has an MLflow plugin that may have made them before a stage's container starts, so there are
three ways to find them:

    the plugin is off             both are ours, and are found again by their tags
    it is on                      the parent has KFP's id of the run as a tag, in whatever experiment; the stage's run
                                  is the child that KFP's driver named after the task
    it is on, in the environment  MLFLOW_RUN_ID is the stage's run, and the run above it the parent

MLflow takes no run ids of ours and has no conditional write of a run, so to look and to make are two steps, and two
attempts can both make one. The store decides then: it lets exactly one of them create a name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from reflux.components.canonical import canonical, sha256_hex
from reflux.components.storage import Store

JOB = "kfp.pipeline_run_id"
"""The plugin's own name of the tag; ours have it too."""
PARENT = "mlflow.parentRunId"
ROLE = {"reflux.role": "pipeline"}
OPENED_BY_KFP = {"reflux.opened_by": "kfp"}
"""KFP's launcher logs parameters and final metrics of such a run itself, in one batch that fails if ours differ."""

CLAIMS = "tracking"
"""Folder of the store in which attempts agree. What is there matters for seconds, and may go afterwards."""

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_DEEPEST = 4  # a loop's run, an iteration's, and a nested pipeline's may stand between


def find_parent(client: Any, experiment: str | None, run: str, job: str) -> Any:
    """The parent run of pipeline run `run`, None if there is none. `experiment` is where ours are made.

    On a cluster the id of the run decides: people give two runs one name.
    """
    above = _above_the_environments(client, job)
    if above is not None:
        return above
    if is_kfp(job):
        everywhere = [each.experiment_id for each in _pages(client.search_experiments)]
        found = [each for each in _search(client, everywhere, {JOB: job}) if PARENT not in each.data.tags]
        return found[0] if found else None
    ours = _search(client, [experiment], {"reflux.run": run, **ROLE}) if experiment else []
    return ours[0] if ours else None


def parent(client: Any, experiment: Callable[[], str], store: Store, run: str, job: str) -> Any:
    """The same, made if there is none. `experiment` gives the id of the experiment to make it in."""
    known = find_parent(client, None, run, job)
    tags = {"reflux.run": run, **ROLE, **_kfp_tags(job)}
    if known is None:
        return _with_tags(client, _only(client, store, experiment(), run, tags, tags), tags)
    if tags.items() <= known.data.tags.items():
        return known
    return _with_tags(client, known, {**tags, **OPENED_BY_KFP})  # KFP's, seen for the first time


def nested(client: Any, parent: Any, store: Store, *, stage: str, run: str, key: str, job: str) -> Any:
    """The run of one stage's work on `key`, found or made below `parent`. A retry gets that of the attempt before."""
    own = {"reflux.run": run, "reflux.stage": stage, "reflux.key": key, **_kfp_tags(job)}
    given = _environments(client, job) or _drivers(client, parent, stage, own)
    if given is not None:
        return _with_tags(client, given, {**own, **OPENED_BY_KFP})
    below = {**own, PARENT: parent.info.run_id}
    made = _only(client, store, parent.info.experiment_id, stage, own, below)
    return _with_tags(client, made, below)  # people may have removed the parent of the first attempt


def stages_below(client: Any, parent: Any) -> list[Any]:
    """The runs of stages, wherever they are below the parent."""
    return [each for each in _below(client, parent) if "reflux.stage" in each.data.tags]


def is_kfp(job: str) -> bool:
    """Whether a cluster gave this id: kfp.local gives eight digits that name nothing."""
    return _UUID.fullmatch(job) is not None


def opened_by_kfp(run: Any) -> bool:
    return OPENED_BY_KFP.items() <= run.data.tags.items()


def _only(
    client: Any, store: Store, experiment: str, name: str, identity: Mapping[str, str], tags: Mapping[str, str]
) -> Any:  # fmt: skip
    """The run with these tags that every attempt uses: the first one whose id got into the store.

    Every other one with this identity is removed, into MLflow's trash: a race made it, or a kill between two steps.
    """
    found = _search(client, [experiment], identity) or [client.create_run(experiment, run_name=name, tags=dict(tags))]
    claim = f"{CLAIMS}/{experiment}/{sha256_hex(canonical(dict(identity)))}"
    chosen = found[0]
    if not store.create(claim, chosen.info.run_id.encode()):
        agreed = store.read(claim).decode()
        earlier = chosen if agreed == chosen.info.run_id else _active(client, agreed)
        if earlier is None:  # people removed it
            store.write(claim, chosen.info.run_id.encode())
        chosen = earlier or chosen
    for other in found:
        if other.info.run_id != chosen.info.run_id:
            client.delete_run(other.info.run_id)
    return chosen


def _above_the_environments(client: Any, job: str) -> Any:
    run = _environments(client, job)
    while run is not None and PARENT in run.data.tags:
        run = client.get_run(run.data.tags[PARENT])
    return run


def _environments(client: Any, job: str) -> Any:
    """The run that KFP's plugin put into the environment. One that somebody else put there is left alone."""
    run_id = os.environ.get("MLFLOW_RUN_ID", "")
    if not run_id or not is_kfp(job):
        return None
    run = top = _active(client, run_id)
    if run is None:  # of another server, or removed
        return None
    while PARENT in top.data.tags:
        top = client.get_run(top.data.tags[PARENT])
    return run if top is not run and top.data.tags.get(JOB) == job else None


def _drivers(client: Any, parent: Any, stage: str, own: Mapping[str, str]) -> Any:
    """The run that KFP's driver made for this task. Tasks of one name in a loop take one each.

    Which one is taken is an immutable parameter of it: of two tasks at once, MLflow refuses the second one's.
    """
    from mlflow.exceptions import MlflowException

    if not opened_by_kfp(parent):
        return None
    named = re.compile(re.escape(stage.replace("_", "-")) + r"(-\d+)?")
    candidates = [run for run in _below(client, parent) if named.fullmatch(run.info.run_name or "")]
    mine = own["reflux.key"]
    for run in sorted(candidates, key=lambda each: each.data.params.get("reflux.key") != mine):
        if run.data.params.get("reflux.key", mine) == mine:
            try:
                client.log_param(run.info.run_id, "reflux.key", mine)
            except MlflowException:
                continue
            return run
    return None


def _below(client: Any, top: Any) -> list[Any]:
    found: list[Any] = []
    level = [top]
    for _ in range(_DEEPEST):
        inner = [run for run in level if "reflux.stage" not in run.data.tags]  # nothing is below a stage
        level = [
            child for run in inner for child in _search(client, [run.info.experiment_id], {PARENT: run.info.run_id})
        ]
        found += level
    return found


def _search(client: Any, experiments: list[str], tags: Mapping[str, str]) -> list[Any]:
    """The runs with these tags, the oldest first."""
    return list(
        _pages(
            client.search_runs, experiment_ids=experiments, filter_string=query(tags),
            order_by=["attributes.start_time ASC"],
        )
    )  # fmt: skip


def query(tags: Mapping[str, str]) -> str:
    """MLflow's filter for runs with these tags. ValueError for what cannot be written in it."""
    return " and ".join(f"tags.`{name}` = '{searchable(name, value)}'" for name, value in tags.items())


def searchable(name: str, value: str) -> str:
    """The value of that name, if MLflow's filters can have it. ValueError if not."""
    if "'" in value or value.endswith("\\"):
        raise ValueError(
            f"{name} {value!r}: a quote, or a backslash at its end, cannot be searched for in MLflow; use letters, "
            "digits, - and _"
        )
    return value


def _pages(search: Any, **arguments: Any) -> Iterator[Any]:
    page = search(**arguments)
    yield from page
    while page.token:
        page = search(**arguments, page_token=page.token)
        yield from page


def _active(client: Any, run_id: str) -> Any:
    from mlflow.exceptions import MlflowException

    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    return run if run.info.lifecycle_stage == "active" else None


def set_tags(client: Any, run_id: str, tags: Mapping[str, str]) -> None:
    """Set tags in one batch: if two writers set a new tag at once, MLflow tries that again, but its set_tag fails."""
    from mlflow.entities import RunTag

    client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])


def _with_tags(client: Any, run: Any, tags: Mapping[str, str]) -> Any:
    """The run, once it has these tags."""
    if tags.items() <= run.data.tags.items():
        return run
    set_tags(client, run.info.run_id, tags)
    return client.get_run(run.info.run_id)


def _kfp_tags(job: str) -> dict[str, str]:
    return {JOB: job} if is_kfp(job) else {}
