"""The task before the first stage: what can be known in seconds is refused here, not after hours, in one line each.

It is no stage: it makes no artifact and no run of its own in MLflow. It sees what only a pod sees: the image, its
credentials, and the values of Kubeflow's form. `reflux run` asks `preflight` by itself and runs no such task.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Mapping
from typing import Any

from reflux.components import declare, overrides
from reflux.components.kubeflow import kfp_task, pods
from reflux.components.overrides import SOURCES

NAME = "prerequisites"
_FIELDS = {"objective": "distill", "registered_model": "evaluate"}  # of the form -> the stage that has them
_ACCELERATORS = ("accelerator", "accelerators")  # what pods.py gives to stages
_PARAMETERS: dict[str, Any] = {
    **{name: dict if name == "overrides" else str for name in declare.PLATFORM_PARAMETERS},
    "recipe": str,
    "configs": dict,
    **dict.fromkeys((*SOURCES, *_FIELDS, *_ACCELERATORS), str),
}
_QUICKLY = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}  # its own are for minutes


def prerequisites(configs: Mapping[str, Any], *, image: str = "", place: Any = None, **arguments: Any) -> Any:
    """KFP's task, inside a pipeline. `configs` are those of the recipe, by stage."""
    values = {
        stage: declare.key_fields(config) | declare.other_fields(config) | declare.source_fields(config)
        for stage, config in configs.items()
    }
    component = kfp_task.component(
        NAME,
        ((name, kind, kfp_task.REQUIRED) for name, kind in _PARAMETERS.items()),
        doc="Refuse in seconds what would stop a stage later.",
        image=declare.IMAGE,
    )
    return kfp_task.started(component, image, place, {"configs": values} | arguments)


def run(parameters: Mapping[str, Any]) -> None:
    """Check what the pipeline was started with, the cheapest first. ValueError, StoreError or ConnectionError names
    what is wrong: field, value, and what is allowed.
    """
    given = dict(parameters)
    configs = final_configs(given)
    pods.check_accelerators(*(given[name] for name in _ACCELERATORS))
    run_name = given["run"] or given["job"]
    for name, value in {"store": given["store"], "run": run_name}.items():
        if not value:
            raise ValueError(f"{name}: must not be empty. {declare.PLATFORM_PARAMETERS[name]}")

    os.environ.update({name: os.environ.get(name, value) for name, value in _QUICKLY.items()})
    from reflux.components import mlflow_connection, preflight, tracking  # seconds, so after what needs none
    from reflux.components.storage import S3Settings, Store

    settings = S3Settings.from_env()
    mlflow_connection.check()
    _require_room(configs, settings)
    store = Store.open(given["store"])
    for remark in preflight.check(configs, store, settings, weights=False):
        print(remark, flush=True)
    # nobody else on a cluster says what the whole run was started with
    asked = {name: given[name] for name in ("recipe", "store", *SOURCES)}
    tracking.begin_pipeline(run_name, asked, store=store, job=given["job"])


def final_configs(given: Mapping[str, Any]) -> dict[str, Any]:
    """The configs that the stages will have: the recipe's, with what was written into the form."""
    configs: dict[str, Any] = {
        stage: declare.from_mapping(_config_class(stage), values) for stage, values in given["configs"].items()
    }
    changes = dict(given["overrides"] or {})
    overrides.require_no_sources(changes)
    for name, stage in _FIELDS.items():
        if isinstance(changes.setdefault(stage, {}), Mapping):  # if it is none, `laid_over` says so
            changes[stage] = {name: given[name], **changes[stage]}
    return overrides.laid_over(configs, {source: given[source] for source in SOURCES} | changes)


def _config_class(stage: str) -> type:
    return getattr(importlib.import_module(f"reflux.components.{stage}.component"), stage).config_class


def _require_room(configs: Mapping[str, Any], settings: Any) -> None:
    """Every pod fetches what lies in S3 or at the hub before it works; a full disk would show in the middle of that."""
    from reflux.components import sources
    from reflux.components.cache import cache_folder
    from reflux.components.provenance import public_uri

    uris = {uri for config in configs.values() for uri in declare.source_fields(config).values()}
    needed = {uri: sources.bytes_to_fetch(uri, settings) for uri in sorted(uris)}
    folder = cache_folder()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(there).free
    if sum(needed.values()) > free:
        largest = max(needed, key=needed.__getitem__)
        raise ValueError(
            f"disk {there}: {free / 1e9:.1f} GB are free, and what has to be fetched takes "
            f"{sum(needed.values()) / 1e9:.1f} GB, of which {public_uri(largest)} {needed[largest] / 1e9:.1f}; "
            "give the pods a larger volume and name it in REFLUX_CACHE and HF_HOME"
        )
