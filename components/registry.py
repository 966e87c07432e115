"""MLflow's registry: which bundle is a version of which model, and which the candidate, the champion and the previous.

A version points at the bundle in the store, and is found again by the digests in its tags. Nothing is copied.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from reflux.components import tracking
from reflux.components.artifacts import Artifact
from reflux.components.mlflow_connection import answering, twice
from reflux.components.run_tree import query
from reflux.components.storage import Store

CANDIDATE, CHAMPION, PREVIOUS = "candidate", "champion", "previous"
PASS = "pass"
ALIASES = (CANDIDATE, CHAMPION, PREVIOUS)
_VERSION = re.compile(r"models:/([^/@]+)(?:@([A-Za-z0-9._-]+)|/([0-9]+))")
_PLACE = re.compile(r"(.+)/objects/([^/]+)/([0-9a-f]{64})/manifest\.json")
_NEEDED = {"reflux.digest", "reflux.root", "reflux.root_place"}
_FROM_PARENT = ("kfp.pipeline_run_id", "kfp.pipeline_run_url", "kfp.pipeline_id", "kfp.pipeline_version_id")


@dataclass(frozen=True, kw_only=True)
class Version:
    """A registered version, as reflux reads it."""

    model: str
    number: int
    store: str
    """Root of the store that holds the bundle and its evaluation."""
    stage: str
    key: str
    digest: str
    """Of the bundle."""
    root: str
    """Digest of the evaluation that it passed."""
    root_stage: str
    root_key: str

    @property
    def name(self) -> str:
        return f"models:/{self.model}/{self.number}"


def require_possible(model: str, store: Store) -> None:
    """ValueError if a bundle in this store cannot become a version of `model`; "" is none, and always possible."""
    uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    if model and not uri:
        raise ValueError(f"registered_model {model!r}: needs MLflow; set MLFLOW_TRACKING_URI")
    if model and uri.startswith(("http://", "https://")) and not store.uri.startswith("s3://"):
        raise ValueError(
            f"registered_model {model!r}: an MLflow server registers what lies in S3, not in {store.uri}; "
            "use a store s3://bucket/prefix"
        )


@answering()
def register(model: str, *, bundle: Artifact, scores: Artifact, run: str, tracked: tracking.StageRun) -> Version:
    """The version of `model` that is this bundle, which passed this evaluation; made if there is none.

    The newest version is the candidate. Of two attempts that make it at once the lower number stays: the server counts,
    so whoever has the higher one sees the other.
    """
    from mlflow.exceptions import MlflowException

    client = tracked.client
    try:
        client.create_registered_model(model, description="Bundles that passed their gate. Aliases: reflux promote.")
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    wanted = {"reflux.digest": bundle.digest, "reflux.root": scores.digest}
    versions = _versions(client, model, wanted)
    if not versions:
        parent = client.get_run(tracked.parent_id)
        tags = {
            **wanted,
            "reflux.root_place": f"{scores.stage}/{scores.key}",
            "reflux.run": run,
            "reflux.recipe": parent.data.params.get("recipe", ""),
            "reflux.verdict": PASS,
            **{name: value for name, value in parent.data.tags.items() if name in _FROM_PARENT},
        }
        client.create_model_version(
            model, source=bundle.uri, run_id=tracked.parent_id, tags={n: v for n, v in tags.items() if v},
            description=_description(bundle, scores, tracked, tags),
        )  # fmt: skip
        versions = _versions(client, model, wanted)
    *others, first = versions
    for other in others:
        with suppress(MlflowException):  # the other attempt removes it too
            client.delete_model_version(model, other.version)
    _name_the_candidate(client, model)
    return read(first)


@answering()
def resolve(client: Any, uri: str) -> Version:
    """The version that models:/NAME@ALIAS or models:/NAME/NUMBER names. ValueError if there is none, or not ours."""
    from mlflow.exceptions import MlflowException

    match = _VERSION.fullmatch(uri)
    if not match:
        raise ValueError(f"{uri}: write models:/NAME@{CHAMPION} or models:/NAME/3")
    model, alias, number = match.groups()
    try:
        if alias:
            return read(client.get_model_version_by_alias(model, alias))
        return read(client.get_model_version(model, number))
    except MlflowException as error:
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        raise ValueError(f"{uri}: MLflow's registry has no such version") from None


@answering()
def aliases(client: Any, model: str) -> dict[str, int]:
    """Alias -> version number of a model. ValueError if there is no such model."""
    from mlflow.exceptions import MlflowException

    try:
        return {name: int(number) for name, number in client.get_registered_model(model).aliases.items()}
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        raise ValueError(f"{model}: MLflow's registry has no such model") from None


@answering()
def is_there(client: Any, model: str, number: int) -> bool:
    """Whether the model has a version of that number, whoever registered it."""
    from mlflow.exceptions import MlflowException

    try:
        client.get_model_version(model, str(number))
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False
    return True


def named(client: Any) -> Iterator[tuple[str, Version]]:
    """Every version of ours that one of the three aliases names, and what to call it: models:/NAME@champion."""
    token = None
    while True:
        with answering():
            page = client.search_registered_models(page_token=token)
            found = [
                (f"models:/{model.name}@{alias}", client.get_model_version(model.name, str(number)))
                for model in page
                for alias, number in model.aliases.items()
                if alias in ALIASES
            ]
        yield from ((name, read(version)) for name, version in found if is_ours(version))
        token = page.token
        if not token:
            return


def is_ours(version: Any) -> bool:
    """Whether reflux registered it."""
    return version.tags.keys() >= _NEEDED and _PLACE.fullmatch(version.source or "") is not None


def read(version: Any) -> Version:
    """A version of MLflow's as ours. ValueError if reflux did not register it."""
    place = _PLACE.fullmatch(version.source or "")
    if not is_ours(version) or place is None:
        raise ValueError(f"models:/{version.name}/{version.version}: was not registered by reflux")
    store, stage, key = place.groups()
    root_stage, _, root_key = version.tags["reflux.root_place"].partition("/")
    return Version(
        model=version.name,
        number=int(version.version),
        store=store,
        stage=stage,
        key=key,
        digest=version.tags["reflux.digest"],
        root=version.tags["reflux.root"],
        root_stage=root_stage,
        root_key=root_key,
    )


def _versions(client: Any, model: str, tags: Mapping[str, str]) -> list[Any]:
    """The versions of a model with these tags, the newest first."""
    found = client.search_model_versions(f"name = '{model}' and {query(tags)}", order_by=["version_number DESC"])
    return [version for version in found if is_ours(version)]


def _name_the_candidate(client: Any, model: str) -> None:
    """The candidate is the newest version, whoever of several at once names it last. A repeated run is no news."""
    from mlflow.exceptions import MlflowException

    named = None
    while (newest := _versions(client, model, {"reflux.verdict": PASS})[0].version) != named:
        try:
            twice(client.set_registered_model_alias, model, CANDIDATE, newest)
            named = newest
        except MlflowException as error:  # an attempt that had the higher number removed it in this moment
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise


def _description(bundle: Artifact, scores: Artifact, tracked: tracking.StageRun, tags: Mapping[str, str]) -> str:
    """Markdown: where the report and the lineage are."""
    report = f"[report]({tracked.url}/artifacts/report.html)" if tracked.url else f"report.html of run {tracked.run_id}"
    kubeflow = tags.get("kfp.pipeline_run_url", "")
    lines = [
        f"Bundle `{bundle.digest}`, evaluated in `{scores.digest}`.",
        f"Scores: {report}" + (f", [pipeline run]({kubeflow})" if kubeflow else ""),
        f"Lineage: `reflux lineage {bundle.digest} --store {bundle.store.uri}`",
    ]
    return "\n\n".join(lines)
