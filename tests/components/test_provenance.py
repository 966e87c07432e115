"""A manifest has one canonical form, and no byte of it can change unseen."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux.components.canonical import canonical
from reflux.components.provenance import (
    ArtifactError,
    Manifest,
    Parent,
    Shard,
    SourceReference,
    from_bytes,
    public_uri,
    to_bytes,
)

quick = settings(max_examples=60, deadline=None, database=None)
text = st.text(st.characters(codec="utf-8"))
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(text, inner), max_leaves=20)


def example() -> Manifest:
    """A manifest with something in every field."""
    draft = Manifest(
        stage="distill",
        version="3",
        key_fields={"lr": 1e-5, "beta": 1.0, "phases": ["joint", "finetune"], "ema": True},
        other_fields={"workers": 2},
        parents={"traces": Parent(stage="collect_traces", key="a" * 64, digest=f"sha256:{'b' * 64}")},
        sources={"student_uri": SourceReference(uri="s3://models/student", digest=f"sha256:{'c' * 64}")},
        metrics={"loss": 0.25, "steps": 30.0},
        versions={"reflux": "0.1.0"},
        platform={"machine": "x86_64"},
        started="2026-01-01T00:00:00Z",
        finished="2026-01-01T00:10:00Z",
    )
    return replace(draft, shards=(shard(draft, "training"), shard(draft, "times", measured=True)))


def shard(manifest: Manifest, name: str, measured: bool = False) -> Shard:
    sha256 = name.encode().hex().rjust(64, "0")
    key = f"objects/{manifest.stage}/{manifest.key}/{sha256}.parquet"
    return Shard(
        name=name, object=key, sha256=sha256, bytes=7, rows=3, schema="d" * 64, measured=measured, metadata={"k": "4"}
    )


@quick
@given(values)
def test_canonical_bytes_are_a_fixed_point(value: Any) -> None:
    data = canonical(value)
    assert json.loads(data) == value
    assert canonical(json.loads(data)) == data
    assert b"\n" not in data


@quick
@given(st.dictionaries(text, scalars, min_size=2))
def test_canonical_bytes_do_not_depend_on_the_order_of_names(value: dict[str, Any]) -> None:
    assert canonical(dict(reversed(value.items()))) == canonical(value)


@quick
@given(st.integers(-(2**53) + 1, 2**53 - 1))
def test_a_whole_float_is_the_integer_that_it_equals(number: int) -> None:
    assert canonical({"n": float(number)}) == canonical({"n": number})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1: "a"}, "\ud800"])
def test_what_json_would_lose_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r".+"):
        canonical([value])


def test_a_manifest_comes_back_as_it_was_written() -> None:
    back = from_bytes(to_bytes(example()), "manifest")
    assert replace(back, shards=()) == replace(example(), shards=())
    assert sorted(back.shards, key=str) == sorted(example().shards, key=str)
    assert (back.key, back.digest) == (example().key, example().digest)


def test_the_document_is_an_in_toto_statement_with_slsa_provenance() -> None:
    """Required fields of https://in-toto.io/Statement/v1 and https://slsa.dev/provenance/v1."""
    document = json.loads(to_bytes(example()))
    assert document["_type"] == "https://in-toto.io/Statement/v1"
    assert document["predicateType"] == "https://slsa.dev/provenance/v1"
    assert all(set(subject) >= {"name", "digest"} for subject in document["subject"])
    assert set(document["predicate"]) == {"buildDefinition", "runDetails"}
    build, run = document["predicate"]["buildDefinition"], document["predicate"]["runDetails"]
    assert set(build) == {"buildType", "externalParameters", "internalParameters", "resolvedDependencies"}
    assert set(run) == {"builder", "metadata"}
    assert run["builder"]["id"]
    digests = [entry["digest"] for entry in document["subject"] + build["resolvedDependencies"]]
    assert all(len(digest["sha256"]) == 64 for digest in digests)


def test_a_change_of_any_byte_of_a_manifest_is_detected() -> None:
    data = to_bytes(example())
    for position in range(len(data)):
        for other in {data[position] ^ 1, ord("0"), ord(" ")} - {data[position]}:
            changed = data[:position] + bytes([other]) + data[position + 1 :]
            with pytest.raises(ArtifactError, match="the-manifest"):
                from_bytes(changed, "the-manifest")
    for changed in (data[:-1], data + b"\n", b"", b"[]", b"{}", json.dumps(json.loads(data)).encode()):
        with pytest.raises(ArtifactError, match="the-manifest"):
            from_bytes(changed, "the-manifest")


@quick
@given(st.data())
def test_a_change_of_any_value_is_detected_even_in_canonical_form(data: st.DataObject) -> None:
    document = json.loads(to_bytes(example()))
    place = document
    while True:  # walk down to a random leaf
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], (dict, list)) or not place[key]:
            break
        place = place[key]
    old = place[key]
    place[key] = data.draw(values.filter(lambda new: canonical(new) != canonical(old)))
    with pytest.raises(ArtifactError):
        from_bytes(canonical(document), "manifest")


def test_the_digest_covers_what_decides_the_content_and_nothing_else() -> None:
    manifest = example()
    training, times = manifest.shards
    other = "e" * 64
    same = {
        "other_fields": {"workers": 8},
        "metrics": {},
        "versions": {},
        "platform": {},
        "started": "",
        "finished": "",
        "shards": (replace(times, sha256=other), training),
    }
    differ = {
        "stage": "calibrate",
        "version": "4",
        "key_fields": {},
        "parents": {},
        "sources": {"student_uri": SourceReference(uri="s3://models/student", digest=f"sha256:{other}")},
        "shards": (replace(training, sha256=other), times),
    }
    assert {field.name for field in fields(Manifest)} == same.keys() | differ.keys()
    for name, value in same.items():
        assert replace(manifest, **{name: value}).digest == manifest.digest, name
        assert replace(manifest, **{name: value}).key == manifest.key, name
    for name, value in differ.items():
        assert replace(manifest, **{name: value}).digest != manifest.digest, name
        assert (replace(manifest, **{name: value}).key != manifest.key) == (name != "shards"), name
    moved = {"student_uri": SourceReference(uri="/elsewhere", digest=f"sha256:{'c' * 64}")}
    assert replace(manifest, sources=moved).digest == manifest.digest
    assert replace(manifest, shards=(replace(training, schema=other), times)).digest != manifest.digest


def test_credentials_never_stand_in_a_uri() -> None:
    assert public_uri("s3://key:secret@bucket/a?X-Amz-Signature=secret#secret") == "s3://bucket/a"
    assert public_uri("/a/folder?with#odd@signs") == "/a/folder?with#odd@signs"
