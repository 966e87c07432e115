"""A store in S3 or a server that speaks it, through boto3: every operation outlives a store that is away for a while.

The server has to decide conditional writes atomically, as AWS and SeaweedFS do. OpenStack Swift looks for the object
before it takes the new one, so two writers at the same moment can both succeed: let one run at a time write there.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from email.utils import parsedate_to_datetime
from functools import lru_cache, partial
from typing import Any, BinaryIO, TypeVar

import boto3
import pyarrow as pa
from botocore.config import Config
from botocore.exceptions import ClientError
from pyarrow import fs

from reflux.components.storage import Entry, S3Settings, Store, StoreError, checked_key
from reflux.components.stores import s3_upload
from reflux.components.stores.s3_errors import (
    CHANGED,
    FAILURES,
    MISSING,
    NO_UPLOAD,
    Patience,
    code,
    explanation,
    patiently,
    transient,
)
from reflux.components.stores.s3_file import RangeFile

CONNECT_S, SILENT_S = 5, 60  # the longest wait for a connection, and for the next byte of an answer
FIRST_CONTACT_S = 2.0  # a store that is looked at before any work is done gets little patience: it may be mistyped
_READ_BYTES = 1 << 20  # at most so much is asked for twice when a stream breaks off
_WRITER = "reflux-writer"  # metadata of conditionally written objects: whose it is
_CHANGED = ClientError({"Error": {"Code": "PreconditionFailed", "Message": "another version"}}, "GetObject")
T = TypeVar("T")


class S3Store(Store):
    def __init__(self, bucket: str, prefix: str, settings: S3Settings) -> None:
        if not bucket:
            raise ValueError("store s3://: a bucket is missing; allowed is s3://bucket/prefix")
        self.bucket, self.settings, self._prefix = bucket, settings, prefix
        self._root = f"{checked_key(prefix)}/" if prefix else ""
        self.uri = f"s3://{bucket}/{prefix}".rstrip("/")
        self.where = f"{self.uri} at {settings.endpoint or 'AWS'}"
        self._client = _client(settings)
        self._bucket_seen = False

    def chunks(self, key: str) -> Iterator[bytes]:
        patience, position, version, total = self._patience(), 0, None, -1
        with self._explained(key):
            while True:
                try:
                    rest = {"Range": f"bytes={position}-", "IfMatch": version} if version else dict[str, str]()
                    answer = self._client.get_object(**self._name(key), **rest)
                    if version is None:
                        version, total = answer["ETag"], answer["ContentLength"]
                    _require_version(answer, version)
                    for chunk in answer["Body"].iter_chunks(_READ_BYTES):
                        position += len(chunk)
                        patience.renew()
                        yield chunk
                    return
                except FAILURES as error:  # go on where it stood, in the same version of the object
                    if position == total and transient(error):
                        return
                    patience.wait(error)

    def open_input(self, key: str) -> Any:
        head = self._head(key)

        def fetch(start: int, length: int) -> bytes:
            return self._range(key, start, length, head["ETag"])

        return pa.PythonFile(RangeFile(int(head["ContentLength"]), fetch), mode="r")

    def read_range(self, key: str, start: int, length: int) -> bytes:
        return self._range(key, start, length, None)

    def write_stream(self, key: str, stream: BinaryIO) -> None:
        with self._explained(key):
            s3_upload.upload(self._client, self._name(key), stream, self._patience, lambda: self.sha256(key))

    def write(self, key: str, data: bytes, *, settled: bool = True) -> None:
        self._ask(key, lambda: self._client.put_object(**self._name(key), Body=data))

    def settle(self, keys: Iterable[str]) -> None:
        """Nothing is left to do: a server answers a write when the object is safe."""

    def create(self, key: str, data: bytes) -> bool:
        patience, writer, repeated = self._patience(), uuid.uuid4().hex, False
        with self._explained(key):
            while True:
                try:
                    self._client.put_object(
                        **self._name(key), Body=data, IfNoneMatch="*", Metadata={_WRITER: writer}
                    )  # fmt: skip
                    return True
                except FAILURES as error:
                    if code(error) in CHANGED:  # taken; by ourselves, if it was only the answer that got lost
                        return repeated and self._head(key)["Metadata"].get(_WRITER) == writer
                    patience.wait(error)
                    repeated = True

    def entries(self, prefix: str = "") -> dict[str, Entry]:
        prefix = prefix.strip("/")
        found: dict[str, Entry] = {}
        place = {"Bucket": self.bucket, "Prefix": self._root + prefix}
        while True:
            page = self._ask(prefix, partial(self._client.list_objects_v2, **place))
            for entry in page.get("Contents", []):
                key = entry["Key"].removeprefix(self._root)
                if not prefix or key == prefix or key.startswith(f"{prefix}/"):
                    modified_s = entry["LastModified"].timestamp()
                    found[key] = Entry(bytes=entry["Size"], modified_s=modified_s, version=entry["ETag"])
            if not page.get("IsTruncated"):
                return dict(sorted(found.items()))
            place["ContinuationToken"] = page["NextContinuationToken"]

    def now_s(self) -> float:
        answer = self._ask("", lambda: self._client.list_objects_v2(Bucket=self.bucket, Prefix=self._root, MaxKeys=1))
        return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()

    def unfinished(self) -> dict[str, Entry]:
        pages = self._client.get_paginator("list_multipart_uploads")
        found = {}
        for page in self._ask("", lambda: [*pages.paginate(Bucket=self.bucket, Prefix=self._root)]):
            for entry in page.get("Uploads", []):
                name = f"{entry['Key'].removeprefix(self._root)}?{entry['UploadId']}"
                found[name] = Entry(bytes=0, modified_s=entry["Initiated"].timestamp(), version=entry["UploadId"])
        return dict(sorted(found.items()))

    def discard(self, name: str) -> None:
        key, _, upload_id = name.rpartition("?")
        try:
            patiently(
                lambda: self._client.abort_multipart_upload(**self._name(key), UploadId=upload_id), self._patience()
            )
        except FAILURES as error:
            if code(error) not in NO_UPLOAD:  # it was finished or removed in between
                with self._explained(key):
                    raise

    def size(self, key: str) -> int:
        return int(self._head(key)["ContentLength"])

    def delete(self, key: str) -> None:
        self._ask(key, lambda: self._client.delete_object(**self._name(key)))

    def delete_prefix(self, prefix: str) -> None:
        keys = [key for key in self.entries(prefix) if key != prefix.strip("/")]
        for start in range(0, len(keys), 1000):  # S3's limit for one request
            names = [{"Key": self._root + key} for key in keys[start : start + 1000]]
            self._ask(prefix, partial(self._delete_all, names))

    def check_writable(self) -> None:
        if self.settings.patience_s > FIRST_CONTACT_S:
            hasty = replace(self.settings, patience_s=FIRST_CONTACT_S)
            return S3Store(self.bucket, self._prefix, hasty).check_writable()
        return super().check_writable()

    def _delete_all(self, names: list[dict[str, str]]) -> None:
        answer = self._client.delete_objects(Bucket=self.bucket, Delete={"Objects": names, "Quiet": True})
        for refusal in answer.get("Errors", []):
            raise ClientError({"Error": refusal}, f"delete of {refusal.get('Key')}")

    def _head(self, key: str) -> Any:
        try:
            return self._ask(key, lambda: self._client.head_object(**self._name(key)))
        except StoreError as error:
            if code(error.__cause__) not in ("400", "403"):
                raise
            # the answer to a HEAD has no body, so it cannot say whether the key, its token or its rights are wrong
            self._ask(key, lambda: self._client.get_object(**self._name(key), Range="bytes=0-0"))
            raise

    def _range(self, key: str, start: int, length: int, version: str | None) -> bytes:
        pinned = {"IfMatch": version} if version else {}
        span = f"bytes={start}-{start + length - 1}"

        def fetch() -> bytes:
            answer = self._client.get_object(**self._name(key), Range=span, **pinned)
            _require_version(answer, version or answer["ETag"])
            return answer["Body"].read()

        return self._ask(key, fetch)

    def _ask(self, key: str, operation: Callable[[], T]) -> T:
        with self._explained(key):
            answer = patiently(operation, self._patience())
            self._bucket_seen = True
            return answer

    def _patience(self) -> Patience:
        return Patience(self.settings.patience_s, self.where)

    def _name(self, key: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self._root + checked_key(key)}

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        try:
            yield
        except FAILURES as error:
            missing = code(error) in MISSING
            if missing and self._bucket_exists():
                raise FileNotFoundError(f"store {self.where}: no object {key}") from error
            reason = explanation(error, "NoSuchBucket" if missing else "")
            raise StoreError(f"store {self.where}: {key or 'root'}: {reason}") from error

    def _bucket_exists(self) -> bool:
        """Told apart only when an object is missing before any was seen: S3 answers both with 404."""
        if not self._bucket_seen:
            try:
                patiently(lambda: self._client.head_bucket(Bucket=self.bucket), self._patience())
            except FAILURES as error:
                if code(error) in MISSING:
                    return False
            self._bucket_seen = True
        return True


def arrow_filesystem(settings: S3Settings) -> fs.S3FileSystem:
    """pyarrow's own access to the same server, for notebooks that read shards without reflux's checks."""
    return fs.S3FileSystem(**settings.arrow_options(), connect_timeout=CONNECT_S, request_timeout=SILENT_S)


def _require_version(answer: Any, version: str) -> None:
    """Some servers do not know If-Match."""
    if answer["ETag"] != version:
        raise _CHANGED


@lru_cache(maxsize=8)
def _client(settings: S3Settings) -> Any:
    return boto3.session.Session().client(  # of its own: the default one remembers the first credentials it found
        "s3",
        **settings.boto3_options(),
        config=Config(
            retries={"total_max_attempts": 1, "mode": "standard"},  # s3_errors.Patience is the one policy
            connect_timeout=CONNECT_S,
            read_timeout=SILENT_S,
            s3={"addressing_style": settings.addressing},
        ),
    )
