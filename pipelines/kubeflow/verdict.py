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
_EXPERIMENTS = 1000  # a page, which is MLflow's limit for runs to search in as well


def of(run_id: str) -> tuple[str, str]:
    """(pass, fail or "", and why it is not known) of the run that has this id in Kubeflow Pipelines."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri.startswith(("http://", "https://")):
        return "", "MLFLOW_TRACKING_URI does not name a server; MLflow has the verdict"
    try:
        found = _search(f"{uri.rstrip('/')}/api/2.0/mlflow", run_id)
    except (urllib3.exceptions.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:  # or other JSON
        return "", f"MLflow did not tell it ({' '.join(str(error).split())[:300]})"
    return (found, "") if found else ("", f"MLflow has no verdict on run {run_id}")


def _search(api: str, run_id: str) -> str:
    """The verdict on the parent run of all stages, which is in Kubeflow's own experiment where its plugin made it."""
    parent = f"tags.`kfp.pipeline_run_id` = '{run_id}' and tags.`reflux.role` = 'pipeline'"
    page: dict[str, str] = {}
    while True:
        told = _ask(f"{api}/experiments/search", {"max_results": _EXPERIMENTS, **page})
        ids = [each["experiment_id"] for each in told.get("experiments", [])]
        found = _ask(f"{api}/runs/search", {"experiment_ids": ids, "filter": parent}) if ids else {}
        tags = [{tag["key"]: tag["value"] for tag in each["data"].get("tags", [])} for each in found.get("runs", [])]
        verdicts = [each["reflux.verdict"] for each in tags if "reflux.verdict" in each]
        page = {"page_token": told.get("next_page_token", "")}
        if verdicts or not page["page_token"]:
            return verdicts[0] if verdicts else ""


def _ask(url: str, content: dict[str, Any]) -> dict[str, Any]:
    pool = urllib3.PoolManager(ca_certs=os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH"))
    answer = pool.request("POST", url, json=content, headers=_credentials(), timeout=TIMEOUT_S, retries=2)
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
