"""The MLflow that MLFLOW_TRACKING_URI names: whether there is one, a client of it, and what its errors mean.

An MLflow that goes away in the middle of a stage looks to the stage like one that was never there: a ConnectionError of
one line, after which the same call may succeed later.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from reflux.components.provenance import public_uri
from reflux.components.stores.s3_settings import S3Settings

_RAISE = {"mlflow", "requests", "urllib3", "sqlalchemy", "boto3", "botocore"}
"""Packages whose errors its client lets through: its own, of HTTP, of its database and of where its artifacts lie."""


def enabled() -> bool:
    return bool(os.environ.get("MLFLOW_TRACKING_URI"))


def check() -> None:
    """ConnectionError if MLflow cannot be used, unless it is off."""
    if enabled():
        connect()


def connect() -> Any:
    """A client of the MLflow that MLFLOW_TRACKING_URI names. ConnectionError if it cannot be used."""
    from mlflow import MlflowClient

    for variable, value in S3Settings.from_env().mlflow_env().items():  # for artifacts that MLflow puts into S3 itself
        if variable.startswith("MLFLOW_"):
            os.environ.setdefault(variable, value)
    try:
        client = MlflowClient(tracking_uri=os.environ["MLFLOW_TRACKING_URI"])
        client.search_experiments(max_results=1)
    except Exception as error:  # whatever it is: nothing of ours has begun
        raise _unusable(error) from error
    return client


@contextmanager
def answering() -> Iterator[None]:
    """Turn what MLflow's client raises into a ConnectionError. Errors that are not its own pass. Also a decorator."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _RAISE:
            raise
        raise _unusable(error) from error


def twice(write: Callable[..., None], *arguments: str) -> None:
    """Write to MLflow's registry, once more if it refuses a row that another client made after it had looked for it."""
    from mlflow.exceptions import MlflowException

    try:
        write(*arguments)
    except MlflowException as error:
        if error.error_code != "BAD_REQUEST":  # what it calls every error of its database but a lost connection
            raise
        write(*arguments)


def run_url(experiment: str, run_id: str) -> str:
    """The page of an MLflow run, "" where no server shows it."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri.startswith(("http://", "https://")):
        return ""
    return f"{public_uri(uri).rstrip('/')}/#/experiments/{experiment}/runs/{run_id}"


def line(error: Exception) -> str:
    """What it says, without the password of a URI: MLflow writes whole addresses into its errors."""
    return " ".join(re.sub(r"://[^/@\s]*@", "://", str(error)).split())[:300]


def _unusable(error: Exception) -> ConnectionError:
    uri = public_uri(os.environ.get("MLFLOW_TRACKING_URI", ""))
    return ConnectionError(f"MLFLOW_TRACKING_URI {uri}: MLflow cannot be used ({line(error)})")
