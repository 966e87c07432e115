"""The gate's verdict on a run that ended on a cluster, as far as it can be known from outside.

The API of Kubeflow Pipelines tells that the run came through, not what the gate said: a run whose gate fails has still
done all of its work. The last stage writes the verdict into MLflow, whose REST interface is asked here, because who
submits runs need not have MLflow's library.
"""

from __future__ import annotations

import json
import os
from typing import Any

import urllib3

TIMEOUT_S = 15
_PAGE = 50


def of(run: str) -> tuple[str, str]:
    """(pass, fail or "", and why it is not known) of the pipeline run that is called `run` in MLflow."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri.startswith(("http://", "https://")):
        return "", "MLFLOW_TRACKING_URI does not name a server; MLflow has the verdict"
    try:
        found = _search(uri.rstrip("/"), run)
    except (urllib3.exceptions.HTTPError, ValueError, KeyError, TypeError) as error:
        return "", f"MLflow did not tell it ({' '.join(str(error).split())[:300]})"
    return (found, "") if found else ("", f"MLflow has no run {run!r} with a verdict")


def _search(uri: str, run: str) -> str:
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "reflux")
    experiment = _ask("GET", f"{uri}/api/2.0/mlflow/experiments/get-by-name", fields={"experiment_name": name})
    if "'" in run:
        raise ValueError(f"run {run!r}: a quote cannot be searched for in MLflow")
    found = _ask(
        "POST",
        f"{uri}/api/2.0/mlflow/runs/search",
        json={
            "experiment_ids": [experiment["experiment"]["experiment_id"]],
            "filter": f"tags.`reflux.run` = '{run}'",
            "max_results": _PAGE,
        },
    )
    tags = [{tag["key"]: tag["value"] for tag in each["data"].get("tags", [])} for each in found.get("runs", [])]
    return next((each["reflux.verdict"] for each in tags if "reflux.verdict" in each), "")


def _ask(method: str, url: str, **content: Any) -> dict[str, Any]:
    pool = urllib3.PoolManager(ca_certs=os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH"))
    answer = pool.request(method, url, headers=_credentials(), timeout=TIMEOUT_S, retries=2, **content)
    if answer.status != 200:
        raise ValueError(f"{answer.status} for {url.partition('/api/')[2]}")
    told: dict[str, Any] = json.loads(answer.data)
    return told


def _credentials() -> dict[str, str]:
    """As MLflow's own client takes them from the environment."""
    user, password = (os.environ.get(f"MLFLOW_TRACKING_{name}", "") for name in ("USERNAME", "PASSWORD"))
    if user:
        return dict(urllib3.make_headers(basic_auth=f"{user}:{password}"))
    token = os.environ.get("MLFLOW_TRACKING_TOKEN", "")
    return {"Authorization": f"Bearer {token}"} if token else {}
