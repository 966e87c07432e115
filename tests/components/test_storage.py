"""A directory and S3 behave as one store: whole objects, one creator, the same errors."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import socket
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import attempts
import pytest
from servers import seaweed

from reflux.components import storage
from reflux.components.storage import S3Settings, Store, StoreError


def test_an_object_comes_back_as_it_was_written(store: Store, tmp_path: Path) -> None:
    content = os.urandom(3_000_000)
    store.write("a/b/c d+ü=%.bin", content)
    assert store.read("a/b/c d+ü=%.bin") == content
    assert store.size("a/b/c d+ü=%.bin") == len(content)
    assert store.sha256("a/b/c d+ü=%.bin") == hashlib.sha256(content).hexdigest()
    with store.open_input("a/b/c d+ü=%.bin") as stream:
        stream.seek(1_000_000)
        assert stream.read(10) == content[1_000_000:1_000_010]
    assert store.download("a/b/c d+ü=%.bin", tmp_path / "new" / "copy") == hashlib.sha256(content).hexdigest()
    assert (tmp_path / "new" / "copy").read_bytes() == content


@pytest.mark.parametrize("size", [0, 1, storage.CHUNK_BYTES, 17_000_001])  # the last is sent to S3 in parts
def test_a_file_of_any_size_is_streamed_both_ways_and_hashed_on_the_way(
    store: Store, tmp_path: Path, size: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(min(size, 1 << 20)) * (size // (1 << 20)) + os.urandom(size % (1 << 20)))
    expected = hashlib.sha256(path.read_bytes()).hexdigest()
    assert store.upload("weights.safetensors", path) == expected
    assert store.download("weights.safetensors", tmp_path / "back") == expected
    assert max((len(chunk) for chunk in store.chunks("weights.safetensors")), default=0) <= storage.CHUNK_BYTES


def test_create_never_replaces(store: Store) -> None:
    assert store.create("manifest", b"first")
    assert not store.create("manifest", b"second")
    assert store.read("manifest") == b"first"
    store.write("manifest", b"third")
    assert store.read("manifest") == b"third"


@pytest.mark.usefixtures("atomic_create")
def test_of_many_processes_that_create_one_object_exactly_one_succeeds(store: Store, s3: S3Settings) -> None:
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        for round_ in range(5):
            outcomes = [pool.submit(attempts.create, store.uri, s3, f"manifest-{round_}", n) for n in range(6)]
            winners = [n for n, outcome in enumerate(outcomes) if outcome.result()]
            assert len(winners) == 1
            assert store.read(f"manifest-{round_}") == str(winners[0]).encode()


def test_listing_takes_a_prefix_as_a_folder(store: Store) -> None:
    for key in ("runs/b", "runs/a/x", "runs2/y", "other"):
        store.write(key, key.encode())
    assert store.list("runs") == store.list("runs/") == ["runs/a/x", "runs/b"]
    assert store.list("runs/b") == ["runs/b"]
    assert store.sizes() == {"other": 5, "runs/a/x": 8, "runs/b": 6, "runs2/y": 7}
    assert store.list("nothing") == []
    store.delete_prefix("runs")
    store.delete_prefix("nothing")
    store.delete("other")
    store.delete("other")
    assert store.list() == ["runs2/y"]


@pytest.mark.slow
def test_more_objects_than_one_request_lists_or_deletes(store: Store) -> None:
    keys = [f"many/{n:04d}" for n in range(1003)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.write(key, b"x"), keys))
    store.write("other", b"x")
    assert store.list("many") == keys
    store.delete_prefix("many")
    assert store.list() == ["other"]


def test_a_missing_object_is_named_with_its_store(store: Store, tmp_path: Path) -> None:
    assert not store.exists("objects/none")
    for read in (store.read, store.size, store.open_input, store.sha256):
        with pytest.raises(FileNotFoundError, match=f"{store.uri}.*objects/none"):
            read("objects/none")
    with pytest.raises(FileNotFoundError, match="objects/none"):
        store.download("objects/none", tmp_path / "copy")
    assert not list(tmp_path.glob("*copy*"))


@pytest.mark.parametrize("key", ["", "/etc/passwd", "a/../b", "a//b", "./a", "a/", "a\\b", "a\nb"])
def test_a_key_cannot_leave_the_store(store: Store, key: str) -> None:
    with pytest.raises(ValueError, match="key"):
        store.write(key, b"")


def test_a_writable_store_is_left_as_it_was(store: Store) -> None:
    store.check_writable()
    assert store.list() == []


def test_an_unwritable_directory_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match=r"store file://.*/file/store: not writable"):
        Store.open(str(tmp_path / "file" / "store")).check_writable()


def test_s3_with_a_wrong_key_bucket_or_endpoint_is_refused_by_name_and_without_the_secret(s3: S3Settings) -> None:
    wrong = S3Settings(endpoint=s3.endpoint, access_key=s3.access_key, secret_key="wrong-secret")
    with pytest.raises(StoreError, match=f"store s3://{seaweed.BUCKET} at {s3.endpoint}: not writable") as refusal:
        Store.open(f"s3://{seaweed.BUCKET}", wrong).check_writable()
    assert "wrong-secret" not in str(refusal.value)
    assert "wrong-secret" not in repr(wrong)
    with pytest.raises(StoreError, match=r"s3://no-such-bucket/x at .*: not writable .*(AccessDenied|NoSuchBucket)"):
        Store.open("s3://no-such-bucket/x", s3).check_writable()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nobody = S3Settings(endpoint=f"http://127.0.0.1:{port}", access_key="a", secret_key="b")
    with pytest.raises(StoreError, match=f"127.0.0.1:{port}"):
        Store.open("s3://bucket", nobody).check_writable()


def test_kfp_addresses_are_understood(s3: S3Settings, tmp_path: Path) -> None:
    store = Store.open(f"minio://{seaweed.BUCKET}/v2/artifacts?endpoint=x&s3ForcePathStyle=true", s3)
    assert store.uri == f"s3://{seaweed.BUCKET}/v2/artifacts"
    assert Store.open(f"file://{tmp_path}").uri == Store.open(f"{tmp_path}/").uri == tmp_path.as_uri()
    for uri in ("gs://bucket", "file://host/folder", "", "s3://"):
        with pytest.raises(ValueError, match="store"):
            Store.open(uri)
