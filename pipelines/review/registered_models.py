"""What commands ask MLflow's registry: the version behind a name, the store of a version, and what gc has to keep."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from reflux.components import mlflow_connection, registry
from reflux.components.registry import Version
from reflux.components.storage import Store
from reflux.pipelines.store import embedded_store, stores
from reflux.pipelines.store.garbage import Place


def database_uri(data_dir: Path) -> str:
    """The MLflow of runs on this machine, unless MLFLOW_TRACKING_URI names another one or is empty."""
    return f"sqlite:///{(data_dir / 'mlflow.db').absolute()}"


def client(data_dir: Path) -> Any:
    """A client of MLflow; None if it is switched off, or if no run has used the one of this machine yet.

    ConnectionError if it is there and does not answer.
    """
    if "MLFLOW_TRACKING_URI" not in os.environ and (data_dir / "mlflow.db").exists():
        os.environ["MLFLOW_TRACKING_URI"] = database_uri(data_dir)
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # else it tells every migration of its database
    return mlflow_connection.connect() if mlflow_connection.enabled() else None


def required_client(data_dir: Path) -> Any:
    """The same. ValueError instead of None."""
    found = client(data_dir)
    if found is None:
        raise ValueError(
            f"MLflow is needed for its registry: set MLFLOW_TRACKING_URI, or name the --data-dir of a run ({data_dir} "
            "has none)"
        )
    return found


def version(uri: str, data_dir: Path) -> Version:
    """The version that models:/NAME@ALIAS or models:/NAME/NUMBER names. ValueError if there is none."""
    return registry.resolve(required_client(data_dir), uri)


def store_of(version: Version, data_dir: Path) -> stores.StoreRef:
    """The store that a version was registered in; its endpoint is that of this environment."""
    own_endpoint = any(os.environ.get(name) for name in (stores.OWN_ENDPOINT, *stores.ENDPOINT_VARIABLES))
    if version.store == f"s3://{embedded_store.BUCKET}" and (data_dir / "store").is_dir() and not own_endpoint:
        return stores.choose("embedded", "", data_dir)[0]
    return stores.choose(version.store, "", data_dir)[0]


def kept(store: Store, data_dir: Path) -> dict[str, list[Place]]:
    """Name -> the bundle that an alias names and its evaluation, for the versions that lie in this store.

    ConnectionError if MLflow is there and does not answer: what it would have named is unknown then.
    """
    mlflow = client(data_dir)
    if mlflow is None:
        return {}
    return {
        name: [(version.stage, version.key), (version.root_stage, version.root_key)]
        for name, version in registry.named(mlflow)
        if version.store == store.uri
    }
