"""What goes wrong between a stage and its S3 server, on a real server behind a proxy that breaks things.

Either the operation comes through with the right bytes, or the error says what is wrong and what helps.
"""

from __future__ import annotations

import io
import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from servers import fault_proxy, seaweed
from servers.fault_proxy import Fault, Proxy

from reflux.components.storage import S3Settings, Store, StoreError
from reflux.components.stores import s3_store
from reflux.components.stores.s3_upload import SINGLE_PUT_BYTES

CONTENT = os.urandom(17_000_000)  # more than one request takes: three parts
CUT = Fault(download_bytes=0)


@pytest.fixture
def proxy(s3: S3Settings) -> Iterator[Proxy]:
    with fault_proxy.in_front_of(s3) as running:
        yield running


@pytest.fixture
def direct(s3: S3Settings) -> Store:
    """An empty store, past the proxy."""
    return Store.open(f"s3://{seaweed.BUCKET}/{uuid.uuid4().hex}", s3)


@pytest.fixture
def store(direct: Store, proxy: Proxy) -> Store:
    """The same, through the proxy."""
    return Store.open(direct.uri, proxy.settings)


def test_a_download_that_breaks_off_goes_on_where_it_stood(store: Store, direct: Store, proxy: Proxy) -> None:
    direct.write("long", CONTENT)
    proxy.next("GET", "long", Fault(download_bytes=9_000_000), Fault(download_bytes=8_000_000))
    assert store.read("long") == CONTENT
    assert proxy.count("GET", "long") == 3
    down_bytes = sum(request.down_bytes for request in proxy.seen)
    assert down_bytes < 1.5 * len(CONTENT)  # of each break, what was on its way is lost


def test_an_upload_that_breaks_off_sends_only_the_lost_parts_again(store: Store, direct: Store, proxy: Proxy) -> None:
    proxy.next("PUT", "partNumber=2", Fault(upload_bytes=1_000_000), CUT)
    proxy.next("POST", "uploads", CUT)
    store.write_stream("long", io.BytesIO(CONTENT))
    assert direct.read("long") == CONTENT
    sent = [n for n in (1, 2, 3) for _ in range(proxy.count("PUT", f"partNumber={n}"))]
    assert sent == [1, 2, 2, 2, 3]
    left = direct.unfinished()
    assert len(left) == 1, "the upload whose beginning nobody heard of"
    direct.discard(next(iter(left)))
    assert direct.unfinished() == {}
    assert direct.list() == ["long"]


def test_a_short_upload_that_breaks_off_is_sent_again(store: Store, direct: Store, proxy: Proxy) -> None:
    data = CONTENT[: SINGLE_PUT_BYTES - 1]
    proxy.next("PUT", "short", Fault(upload_bytes=1_000_000))
    store.write_stream("short", io.BytesIO(data))
    assert direct.read("short") == data


def test_a_finished_upload_whose_answer_was_lost_is_not_an_error(store: Store, direct: Store, proxy: Proxy) -> None:
    proxy.next("POST", "uploadId", CUT)
    store.write_stream("long", io.BytesIO(CONTENT))
    assert proxy.count("POST", "uploadId") == 2
    assert direct.read("long") == CONTENT
    assert direct.unfinished() == {}


@pytest.mark.parametrize("lost", [1, 2])
def test_a_creator_whose_answer_was_lost_knows_its_own_object(
    store: Store, direct: Store, proxy: Proxy, lost: int
) -> None:
    proxy.next("PUT", "manifest", *[CUT] * lost)
    assert store.create("manifest", b"mine")
    assert not store.create("manifest", b"mine"), "the same bytes, but another writer's"
    assert direct.read("manifest") == b"mine"


def test_a_creator_that_broke_off_before_the_write_loses_to_another(store: Store, direct: Store, proxy: Proxy) -> None:
    proxy.next("PUT", "manifest", Fault(upload_bytes=2, before=lambda: direct.create("manifest", b"mine")))
    assert not store.create("manifest", b"mine")
    proxy.next("PUT", "other", Fault(upload_bytes=2))
    assert store.create("other", b"mine")


def test_every_operation_comes_through_a_connection_that_breaks_once(
    store: Store, direct: Store, proxy: Proxy, tmp_path: Path
) -> None:
    direct.write("a/1", b"12345")

    def through(method: str, part: str, operation: Callable[[], object]) -> object:
        proxy.next(method, part, CUT)
        outcome = operation()
        assert proxy.faults == []
        return outcome

    assert through("GET", "a/1", lambda: store.read("a/1")) == b"12345"
    assert through("HEAD", "a/1", lambda: store.size("a/1")) == 5
    assert through("HEAD", "a/1", lambda: store.exists("a/1")) is True
    assert through("GET", "a/1", lambda: store.open_input("a/1").read(3)) == b"123"
    assert through("GET", "a/1", lambda: store.read_range("a/1", 1, 2)) == b"23"
    assert through("GET", "list-type=2", lambda: store.list()) == ["a/1"]
    assert through("GET", "uploads", lambda: store.unfinished()) == {}
    assert through("PUT", "a/2", lambda: store.write("a/2", b"x")) is None
    through("DELETE", "a/2", lambda: store.delete("a/2"))
    assert direct.list() == ["a/1"]
    through("POST", "delete", lambda: store.delete_prefix("a"))
    assert direct.list() == []


def test_a_server_that_asks_to_slow_down_is_asked_again(store: Store, proxy: Proxy) -> None:
    proxy.next("PUT", "key", Fault(status=503, code="SlowDown"), Fault(status=500, code="InternalError"))
    store.write("key", b"x")
    assert store.read("key") == b"x"


def test_a_slow_server_is_waited_for(store: Store, proxy: Proxy) -> None:
    proxy.next("PUT", "key", Fault(silent_s=0.7))
    proxy.next("GET", "key", Fault(silent_s=0.7))
    store.write("key", b"x")
    assert store.read("key") == b"x"
    assert len(proxy.seen) == 2, "slow is not broken: nothing was asked twice"


@pytest.mark.slow
def test_a_store_that_stays_away_is_an_error_within_the_bound(store: Store, direct: Store, proxy: Proxy) -> None:
    hasty = Store.open(store.uri, replace(proxy.settings, patience_s=1.0))
    direct.write("long", CONTENT)
    reading = hasty.chunks("long")
    next(reading)
    proxy.go_away(60)
    operations: list[Callable[[], object]] = [
        lambda: hasty.read("long"),
        lambda: list(reading),
        lambda: hasty.create("key", b"x"),
        lambda: hasty.write_stream("key", io.BytesIO(CONTENT)),
        lambda: hasty.list(),
        lambda: hasty.delete("long"),
    ]
    for operation in operations:
        started = time.monotonic()
        with pytest.raises(StoreError, match=f"store {store.uri} at {proxy.settings.endpoint}: "):
            operation()
        assert time.monotonic() - started < 3.0
    proxy.away_until = 0.0
    assert hasty.read("long") == CONTENT
    assert not direct.exists("key")


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "AccessDenied", "the key may not do this: it needs to read, write, list and delete"),
        (400, "ExpiredToken", "the session token has expired: get new credentials and run the same command again"),
        (403, "InvalidAccessKeyId", "the server does not know this access key; see AWS_ACCESS_KEY_ID"),
        (301, "PermanentRedirect", "the bucket is in another region; set AWS_REGION"),
        (403, "RequestTimeTooSkewed", "this machine's clock differs"),
    ],
)
def test_a_refusal_is_said_at_once_with_what_helps(
    store: Store, proxy: Proxy, status: int, code: str, message: str
) -> None:
    refused = Fault(status=status, code=code)
    operations: list[tuple[str, Callable[[], object]]] = [
        ("GET", lambda: store.read("key")),
        ("PUT", lambda: store.create("key", b"x")),
        ("GET", lambda: store.list()),
        ("POST", lambda: store.write_stream("key", io.BytesIO(CONTENT))),
        ("DELETE", lambda: store.delete("key")),
    ]
    if status in (400, 403):
        operations.append(("HEAD", lambda: store.exists("key")))  # whose answer has no body to say it
    for method, operation in operations:
        before = proxy.count(method)
        proxy.next(method, "", refused)
        proxy.next("GET", "key", *[refused] * (method == "HEAD"))
        with pytest.raises(StoreError, match=message):
            operation()
        assert proxy.faults == []
        assert method == "HEAD" or proxy.count(method) == before + 1, "nothing was asked twice"


def test_a_missing_bucket_is_not_a_missing_object(s3: S3Settings) -> None:
    absent = Store.open("s3://no-such-bucket/x", s3)
    operations: list[Callable[[], object]] = [
        lambda: absent.read("key"),
        lambda: absent.exists("key"),
        lambda: absent.list(),
    ]
    for operation in operations:
        with pytest.raises(StoreError, match=r"no-such-bucket/x at .*there is no such bucket at this endpoint"):
            operation()


def test_without_credentials_the_variables_are_named(
    s3: S3Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    nobody = Store.open(f"s3://{seaweed.BUCKET}", S3Settings(endpoint=s3.endpoint))
    with pytest.raises(StoreError, match="no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        nobody.read("key")


@pytest.mark.parametrize("size", [len(CONTENT), pytest.param(len(CONTENT) - 1, marks=pytest.mark.slow)])
def test_an_object_that_changes_under_a_reader_is_noticed(store: Store, direct: Store, proxy: Proxy, size: int) -> None:
    direct.write("long", CONTENT)
    other = os.urandom(size)
    proxy.next("GET", "long", Fault(download_bytes=10_000_000))
    proxy.next("GET", "long", Fault(before=lambda: direct.write("long", other)))
    with pytest.raises(StoreError, match="long: the object was changed while it was being read"):
        store.read("long")
    assert store.read("long") == other
    stream = store.open_input("long")
    assert stream.read(10) == other[:10]
    direct.write("long", CONTENT)
    with pytest.raises(OSError, match="long: the object was changed while it was being read"):
        stream.read(10)


def test_an_object_that_is_removed_under_a_reader_is_noticed(store: Store, direct: Store, proxy: Proxy) -> None:
    direct.write("long", CONTENT)
    proxy.next("GET", "long", Fault(download_bytes=10_000_000))
    proxy.next("GET", "long", Fault(before=lambda: direct.delete("long")))
    with pytest.raises(FileNotFoundError, match="no object long"):
        store.read("long")


@pytest.mark.slow
def test_a_store_at_first_contact_gets_little_time(proxy: Proxy) -> None:
    patient = replace(proxy.settings, patience_s=600.0)
    proxy.go_away(60)
    started = time.monotonic()
    with pytest.raises(StoreError, match="not writable"):
        Store.open(f"s3://{seaweed.BUCKET}/x", patient).check_writable()
    assert time.monotonic() - started < 3 * s3_store.FIRST_CONTACT_S
