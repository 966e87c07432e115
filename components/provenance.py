"""What an artifact was made from, as one small JSON document that tools other than reflux can read.

The document is an in-toto Statement v1 (https://in-toto.io/Statement/v1) whose predicate is SLSA provenance v1
(https://slsa.dev/provenance/v1). Where the fields of `Manifest` stand in it:

    shards                   subject[]: sha256 of the object's bytes; the rest as annotations
    stage, version, key      buildDefinition.externalParameters: what decides the result
        fields
    other fields             buildDefinition.internalParameters: what cannot change it
    parents, sources         buildDefinition.resolvedDependencies[]: a parent's digest is the one defined below, a
                             source's that of its file or folder (sources.py)
    versions                 runDetails.builder.version
    started, finished        runDetails.metadata.startedOn, finishedOn
    platform, metrics, key,  runDetails.metadata.reflux_*; reflux_manifest is a sha256 over the document without it
        digest

Its bytes are the canonical serialisation. A document is accepted only if writing again what was read from it gives the
same bytes, so any changed byte shows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from reflux.components.canonical import canonical, sha256_hex

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:reflux:stage:v1"
BUILDER_ID = "urn:reflux:components"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://\S*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ArtifactError(ValueError):
    """An artifact is missing, incomplete or not what its digests say: names the object."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One object of an artifact. `measured`: it holds this run's times, so it is checked, but outside the digest."""

    name: str
    object: str  # key in the store, in the artifact's folder, or in a parent's whose shard it is as well
    sha256: str  # hex
    bytes: int
    rows: int | None = None  # None for what is not a table
    schema: str | None = None  # fingerprint of the columns' names, types and nullability
    measured: bool = False
    metadata: dict[str, str] = field(default_factory=dict)  # of the table's schema
    parts: list[list[Any]] = field(default_factory=list)  # of a large table: [bytes, sha256], see column_reads.py


@dataclass(frozen=True, kw_only=True)
class Parent:
    """An artifact that was an input, found at stage and key, and its content digest."""

    stage: str
    key: str
    digest: str


@dataclass(frozen=True, kw_only=True)
class SourceReference:
    """A file or folder that was an input: where it was read, without credentials, and the digest of its content."""

    uri: str
    digest: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    stage: str
    version: str
    key_fields: Mapping[str, Any]
    other_fields: Mapping[str, Any]
    parents: Mapping[str, Parent]
    sources: Mapping[str, SourceReference]
    shards: tuple[Shard, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(
        default_factory=dict
    )  # of the code and what it ran on; not hashed into the digest
    platform: Mapping[str, str] = field(default_factory=dict)  # the same
    started: str = ""  # UTC, ISO 8601
    finished: str = ""

    @property
    def key(self) -> str:
        """sha256 over what decides the result before any work is done: the address of the artifact."""
        return sha256_hex(canonical(self._inputs() | {"config": sha256_hex(canonical(self.key_fields))}))

    @property
    def digest(self) -> str:
        """sha256 over inputs and content: equal work has equal digests, whenever and in whatever order it was done."""
        content = sorted(
            (shard.name, shard.sha256, shard.schema, *([shard.parts] if shard.parts else []))
            for shard in self.shards
            if not shard.measured
        )
        return "sha256:" + sha256_hex(canonical(self._inputs() | {"config": self.key_fields, "shards": content}))

    def _inputs(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "version": self.version,
            "parents": {name: parent.digest for name, parent in self.parents.items()},
            "sources": {name: source.digest for name, source in self.sources.items()},
        }


def to_bytes(manifest: Manifest) -> bytes:
    """The document, sealed with a digest over itself."""
    return _seal(_document(manifest))


def from_bytes(data: bytes, name: str) -> Manifest:
    """Read a document. ArtifactError, with `name`, if it is not one or if a byte of it was changed."""
    try:
        manifest = _parse(json.loads(data))
        unchanged = to_bytes(manifest) == data
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArtifactError(f"{name}: not a manifest of reflux ({type(error).__name__}: {error})") from error
    if not unchanged:
        raise ArtifactError(
            f"{name}: changed after it was written: its content does not give the digests that it carries"
        )
    return manifest


def checked_name(name: str) -> str:
    """Refuse a shard, stage or file name that is not a plain relative path."""
    if not _NAME.fullmatch(name):
        allowed = "letters, digits, '.', '_', '-' in parts separated by '/', none starting with '.' or '-'"
        raise ValueError(f"name {name!r}: allowed are {allowed}")
    return name


def public_uri(text: str) -> str:
    """A URI without credentials, query and fragment: what may stand in a manifest or a log. Other text as it is."""
    if not _URI.fullmatch(text):
        return text
    parts = urlsplit(text)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _document(manifest: Manifest) -> dict[str, Any]:
    dependencies = [
        {"name": name, "digest": _digest_set(parent.digest), "annotations": {"stage": parent.stage, "key": parent.key}}
        for name, parent in sorted(manifest.parents.items())
    ] + [
        {"name": name, "digest": _digest_set(source.digest), "uri": source.uri}
        for name, source in sorted(manifest.sources.items())
    ]
    return {
        "_type": STATEMENT_TYPE,
        "predicateType": PREDICATE_TYPE,
        "subject": [
            {
                "name": shard.name,
                "digest": {"sha256": shard.sha256},
                "annotations": {
                    "object": shard.object,
                    "bytes": shard.bytes,
                    "rows": shard.rows,
                    "schema": shard.schema,
                    "metadata": shard.metadata,
                    "measured": shard.measured,
                    **({"parts": shard.parts} if shard.parts else {}),
                },
            }
            for shard in sorted(manifest.shards, key=lambda shard: shard.name)
        ],
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "stage": manifest.stage,
                    "version": manifest.version,
                    "config": manifest.key_fields,
                },
                "internalParameters": {"config": manifest.other_fields},
                "resolvedDependencies": dependencies,
            },
            "runDetails": {
                "builder": {"id": BUILDER_ID, "version": manifest.versions},
                "metadata": {
                    "startedOn": manifest.started,
                    "finishedOn": manifest.finished,
                    "reflux_platform": manifest.platform,
                    "reflux_metrics": manifest.metrics,
                    "reflux_key": manifest.key,
                    "reflux_digest": manifest.digest,
                },
            },
        },
    }


def _seal(document: dict[str, Any]) -> bytes:
    seal = "sha256:" + sha256_hex(canonical(document))
    document["predicate"]["runDetails"]["metadata"]["reflux_manifest"] = seal
    return canonical(document)


def _parse(document: dict[str, Any]) -> Manifest:
    build, run = document["predicate"]["buildDefinition"], document["predicate"]["runDetails"]
    if build["buildType"] != BUILD_TYPE:
        raise ValueError(f"buildType {build['buildType']!r}: this version of reflux reads {BUILD_TYPE}")
    parents, sources = {}, {}
    for entry in build["resolvedDependencies"]:
        digest = f"sha256:{entry['digest']['sha256']}"
        if "annotations" in entry:
            place = entry["annotations"]
            parents[entry["name"]] = Parent(stage=checked_name(place["stage"]), key=_hex(place["key"]), digest=digest)
        else:
            sources[entry["name"]] = SourceReference(uri=entry["uri"], digest=digest)
    external, metadata = build["externalParameters"], run["metadata"]
    manifest = Manifest(
        stage=checked_name(external["stage"]),
        version=external["version"],
        key_fields=external["config"],
        other_fields=build["internalParameters"]["config"],
        parents=parents,
        sources=sources,
        shards=tuple(_parse_shard(entry) for entry in document["subject"]),
        metrics={name: float(value) for name, value in metadata["reflux_metrics"].items()},
        versions=run["builder"]["version"],
        platform=metadata["reflux_platform"],
        started=metadata["startedOn"],
        finished=metadata["finishedOn"],
    )
    own_and_inherited = [(manifest.stage, manifest.key), *((parent.stage, parent.key) for parent in parents.values())]
    folders = {f"objects/{stage}/{key}" for stage, key in own_and_inherited}
    for shard in manifest.shards:
        folder, _, name = shard.object.rpartition("/")
        if folder not in folders or not name.startswith(f"{shard.sha256}."):
            raise ValueError(f"shard {shard.name}: its object {shard.object!r} does not belong to this artifact")
    return manifest


def _parse_shard(entry: dict[str, Any]) -> Shard:
    return Shard(name=checked_name(entry["name"]), sha256=_hex(entry["digest"]["sha256"]), **entry["annotations"])


def _digest_set(digest: str) -> dict[str, str]:
    return {"sha256": digest.removeprefix("sha256:")}


def _hex(value: str) -> str:
    if not _SHA256.fullmatch(value):
        raise ValueError(f"{value!r} is not a sha256 in hexadecimal")
    return value
