"""What lies outside the store, compared with it: run.json, RUN/bundle/ and RUN's pages are copies and may differ.

Every function returns the mismatches, one line each that names the file; none if it says what the manifests say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reflux.components import calls, declare
from reflux.components.artifacts import Artifact, ArtifactError, manifest_key, place, verify_copy
from reflux.components.storage import Store
from reflux.pipelines import runs
from reflux.pipelines.review import report

PAGES = {"evaluate": "report.html", "profile_kv": "profile.html"}
"""Stage -> its page, which `reflux run` copies into the folder of the run."""


def compare_record(path: Path, record: runs.RunRecord, artifacts: Mapping[str, Artifact], store: Store) -> list[str]:
    """run.json beside the artifacts (by stage): digests, keys, what decided their results, and the verdict.

    The recipe's name, settings and URIs stand in no digest of an artifact: they are only held together by the record's
    own digest over them, which shows a slip.
    """
    found = []
    for stage, artifact in artifacts.items():
        recorded = record.artifacts.get(stage, {})
        if recorded.get("digest") != artifact.digest:
            found.append(f"{path}: {stage} is {artifact.digest}, recorded is {recorded.get('digest')}")
        if recorded.get("key") != artifact.key:
            found.append(f"{path}: the key of {stage} is {artifact.key}, recorded is another")
        found += [f"{path}: {line}" for line in _compare_config(record.configs.get(stage, {}), artifact)]
    if record.config_digest != runs.config_digest(record.recipe, record.configs, record.store):
        found.append(f"{path}: recipe, configs and store do not give the config_digest recorded beside them")
    try:
        verdict = report.from_artifact(store, record.run, record.artifacts["evaluate"]["key"])["verdict"]
    except ArtifactError:  # named by whoever verified it
        return found
    if record.verdict != verdict:
        found.append(f"{path}: the verdict is {verdict}, recorded is {record.verdict!r}")
    return found


def _compare_config(recorded: Mapping[str, Any], artifact: Artifact) -> list[str]:
    """Recorded fields beside the manifest's. Settings may differ: an artifact is reused whatever they were."""
    made = artifact.record
    differing = [
        f"{artifact.stage}.{name} is {value!r}, recorded is {recorded.get(name)!r}"
        for name, value in made.key_fields.items()
        if name not in recorded or recorded[name] != value
    ]
    known = made.key_fields.keys() | made.other_fields.keys() | made.sources.keys()
    unset = declare.later_fields(calls.load(artifact.stage).config_class)
    unknown = [
        name
        for name, value in recorded.items()
        if name not in known and value != "" and not (name in unset and value == unset[name])  # "" is no source
    ]
    unknown += [name for name in made.sources if not recorded.get(name)]
    return differing + [f"{artifact.stage}.{name} is recorded otherwise than in {artifact.place}" for name in unknown]


def compare_bundle(bundle: Path, store: Store, key: str) -> list[str]:
    """A bundle's files beside its manifest, and its manifest beside the store's."""
    problems = verify_copy(bundle)
    manifest, name = bundle / "manifest.json", manifest_key("calibrate", key)
    if manifest.is_file() and not problems and (not store.exists(name) or store.read(name) != manifest.read_bytes()):
        return [f"{manifest}: is not the manifest in the store, {place(store, name)}"]
    return problems


def compare_page(page: Path, artifact: Artifact) -> list[str]:
    """The page beside the one of that name in the artifact."""
    shards = artifact.shards(page.name)
    if not shards:  # made by a version that had no such page
        return []
    (shard,) = shards
    if not page.is_file():
        return [f"{page}: missing"]
    if hashlib.sha256(page.read_bytes()).hexdigest() != shard.sha256:
        return [f"{page}: was changed: its manifest says sha256 {shard.sha256}"]
    return []
