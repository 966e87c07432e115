"""One entry point for every stage, in a container, under kfp.local and by hand.

    python -m reflux.components STAGE --executor-input JSON                 as KFP calls it
    python -m reflux.components STAGE --store URI --run NAME --FIELD VALUE … --INPUT MANIFEST … --out-OUTPUT PATH
    torchrun --nproc-per-node 4 -m -- reflux.components distill …          one stage in several processes
    python -m reflux.components STAGE --help

STAGE is a folder of reflux.components, or the dotted package of a stage that lives elsewhere. What all stages share is
here and nowhere else: open and check the inputs, fetch and digest the sources, reuse what is already made, run, commit,
track. A wrong input is one line and exit code 2, a store or MLflow that does not answer one line and exit code 75
(EX_TEMPFAIL: the same call may succeed later); REFLUX_TRACEBACK=1 shows where. Anything else is a fault of the
program: its traceback, one line, and exit code 1.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from reflux.components import calls, declare, environment, processes
from reflux.components.calls import Call
from reflux.components.declare import Component
from reflux.components.kubeflow import kfp_executor, train_job
from reflux.components.kubeflow.kfp_executor import Location
from reflux.components.kubeflow.train_job import TrainJobError
from reflux.components.storage import Store, StoreError

CRASHED = 1
WRONG_INPUT = 2
INTERRUPTED = 130
TASKS = ("prerequisites", "close_run")
"""Programs of a pipeline that are no stages: modules of reflux.components.kubeflow with `run(parameters)`."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(arguments: list[str]) -> int:
    _die_with_parent()
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"{__doc__}\nStages: {', '.join(calls.stages())}")
        return 0 if arguments else WRONG_INPUT
    package, *flags = arguments
    stage = package.rpartition(".")[2]
    try:
        environment.require_compiled_version()
        if package in TASKS:
            importlib.import_module(f"reflux.components.kubeflow.{package}").run(calls.executor_input(flags).parameters)
        else:
            component = calls.load(package)
            call = calls.parse(component, flags)
            if processes.started() > 1 and not component.distributed:
                raise ValueError(f"torchrun started {processes.started()} processes, and this stage works in one")
            with processes.joined():
                execute(package, component, call)
    except (ValueError, StoreError, ConnectionError, TrainJobError) as error:
        if "REFLUX_TRACEBACK" in os.environ:
            raise
        print(f"reflux {stage}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return WRONG_INPUT if isinstance(error, ValueError) else os.EX_TEMPFAIL
    except KeyboardInterrupt:
        print(f"reflux {stage}: interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED
    except Exception as error:
        traceback.print_exc()
        print(f"reflux {stage}: {type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return CRASHED
    return 0


def execute(package: str, component: Component, call: Call) -> None:
    """Make the stage's artifact, or find it made, and hand its manifest and pages over. Of several processes the first
    does this, and the others run the stage along with it.
    """
    from reflux.components import artifacts, progress, registry, sources, tracking
    from reflux.components.kubeflow import shown

    stage = component.name.rpartition(".")[2]
    store = Store.open(call.store)
    model = call.config.registered_model if component.registers else ""
    registry.require_possible(model, store)
    parents = {name: _opened(store, place) for name, place in call.inputs.items()}
    parents = _in_order(component, parents)
    inputs = _grouped(component, parents)
    given = {field: sources.resolve(field, uri) for field, uri in declare.source_fields(call.config).items()}
    writer = artifacts.Writer(
        store,
        stage=stage,
        version=importlib.import_module(f"{calls.package_of(package)}.config").STAGE_VERSION,
        key_fields=declare.hashed_fields(call.config),
        other_fields=declare.other_fields(call.config),
        parents=parents,
        sources=given,
        platform={
            "threads": os.environ.get("OMP_NUM_THREADS") or str(os.cpu_count()),
            "processes": str(processes.count()),
        },
    )
    (output,) = component.outputs
    if not processes.is_first():
        if not processes.told(False):
            importlib.import_module(f"{calls.package_of(package)}.stage").run(call.config, **inputs, **{output: writer})
        return
    elsewhere = bool(call.train_job) and writer.existing() is None
    if elsewhere:
        flags = calls.as_flags(component, call, parents)
        body = train_job.job(call.train_job, stage=stage, key=writer.key, run=call.run, flags=flags)
        train_job.run_to_end(train_job.here(), body)
    params = declare.key_fields(call.config) | declare.other_fields(call.config) | declare.source_fields(call.config)
    with tracking.stage_run(
        stage, call.run, job=call.job, store=store, key=writer.key, params=params, parents=parents, sources=given
    ) as tracked:
        artifact = writer.existing()
        reused = processes.told(artifact is not None and not elsewhere)
        if artifact is None and elsewhere:
            raise TrainJobError(f"the TrainJob is complete, and {store.uri} has no {stage} {writer.key}")
        if artifact is None:
            run = importlib.import_module(f"{calls.package_of(package)}.stage").run
            with progress.listening(tracked.publish if tracked else lambda points: None):
                artifact = writer.commit(run(call.config, **inputs, **{output: writer}))
        pages = {shard: artifact.file(shard) for shard in component.html.values()}
        if tracked:
            tracked.finish(artifact, reused=reused, pages=pages)
    version = ""
    if tracked and component.ends_run:  # on a cluster nobody else would close the parent run
        verdict = {1.0: "pass", 0.0: "fail"}[artifact.metrics["verdict.pass"]]
        if model and verdict == registry.PASS:
            bundle = parents[component.registers]
            version = registry.register(model, bundle=bundle, scores=artifact, run=call.run, tracked=tracked).name
        tracking.end_pipeline(call.run, status="FINISHED", job=call.job, verdict=verdict, root=artifact.digest)
    print(f"{stage}: {'reused' if reused else 'made'} {artifact.digest}", flush=True)

    named = {"mlflow_run_id": tracked.run_id, "mlflow_run_url": tracked.url, "registered": version} if tracked else {}
    links = {name: value for name, value in named.items() if value}
    contents = {
        **dict.fromkeys(component.outputs, artifact.bytes),
        **{name: pages[shard] for name, shard in component.html.items()},
        "metrics": shown.metrics_file(artifact),
        "summary": shown.summary(artifact, reused=reused, links=links).encode(),
    }
    digests = {"digest": artifact.digest, "key": artifact.key, "stage": stage, "reused": "yes" if reused else "no"}
    metadata: dict[str, Mapping[str, str | float]] = {
        **dict.fromkeys(component.outputs, digests | links),
        "metrics": shown.numbers(artifact),
    }
    made: dict[str, tuple[str, Mapping[str, str | float]]] = {}
    for name, place in call.outputs.items():
        place.path.parent.mkdir(parents=True, exist_ok=True)
        place.path.write_bytes(contents[name])
        made[name] = (place.uri, metadata.get(name, {}))
    if call.executor_output is not None:
        kfp_executor.write_output(call.executor_output, made)


def _opened(store: Store, place: Location) -> Any:
    """The artifact of a manifest in a file, or of one that is named by its key in the store."""
    from reflux.components.artifacts import Artifact

    if place.path.is_file():
        return Artifact.load(store, place.path.read_bytes())
    _, stage, key, _ = place.path.parts
    return Artifact.open(store, stage, key)


def _in_order(component: Component, parents: Mapping[str, Any]) -> dict[str, Any]:
    """The artifacts, those of a list by digest: in whatever order they were collected, equal ones give an equal key."""
    ordered = dict(parents)
    for name in component.several:
        given = [each for each in parents if each.startswith(f"{name}/")]
        by_digest = sorted((parents[each] for each in given), key=lambda artifact: artifact.digest)
        ordered |= dict(zip(given, by_digest, strict=True))
    return ordered


def _grouped(component: Component, parents: Mapping[str, Any]) -> dict[str, Any]:
    """The artifacts as a stage takes them."""
    several = {name: calls.given_for(name, parents) for name in component.several}
    return {name: several.get(name) or parents[name] for name in component.inputs}


def _die_with_parent() -> None:
    """Under the embedded runner, have the kernel kill this process when the runner dies, kill -9 included."""
    parent = os.environ.get("REFLUX_PARENT_PID")
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before the line above
        sys.exit(1)


if __name__ == "__main__":
    # a pod that is evicted, or whose run is terminated, gets this before it is killed: time to tell MLflow
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
