"""A store in S3 or a server that speaks it: boto3 for objects and conditional writes, pyarrow for random access.

The server has to decide conditional writes atomically, as AWS and SeaweedFS do. OpenStack Swift looks for the object
before it takes the new one, so two writers at the same moment can both succeed: let one run at a time write there.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import boto3
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from pyarrow import fs

from reflux.components.storage import CHUNK_BYTES, S3Settings, Store, StoreError, checked_key

_ATTEMPTS = 4  # of one request or of one stalled stream: bounded, so that a dead endpoint is an error within a minute
_SINGLE_PUT_BYTES = 16 << 20
_MISSING = {"404", "NoSuchKey", "NotFound"}
_EXISTS = {"412", "PreconditionFailed"}
_CONFLICT = {"409", "ConditionalRequestConflict"}  # another conditional write is under way: its outcome decides


class S3Store(Store):
    def __init__(self, bucket: str, prefix: str, settings: S3Settings) -> None:
        if not bucket:
            raise ValueError("store s3://: a bucket is missing; allowed is s3://bucket/prefix")
        self.bucket, self.settings = bucket, settings
        self._root = f"{checked_key(prefix)}/" if prefix else ""
        self.uri = f"s3://{bucket}/{prefix}".rstrip("/")
        self.where = f"{self.uri} at {settings.endpoint or 'AWS'}"
        self._client = _client(settings)

    def chunks(self, key: str) -> Iterator[bytes]:
        with self._explained(key):
            answer = self._client.get_object(**self._name(key))
        position, total, version, failures = 0, answer["ContentLength"], answer["ETag"], 0
        while True:
            try:
                with self._explained(key):
                    for chunk in answer["Body"].iter_chunks(CHUNK_BYTES):
                        position += len(chunk)
                        yield chunk
                return
            except StoreError:  # the stream broke off: go on where it stood, in the same version of the object
                failures += 1
                if position == total or failures == _ATTEMPTS:
                    raise
            with self._explained(key):
                answer = self._client.get_object(**self._name(key), Range=f"bytes={position}-", IfMatch=version)

    def open_input(self, key: str) -> Any:
        self.size(key)  # pyarrow's own message for a missing object names neither endpoint nor store
        with self._explained(key):
            return _filesystem(self.settings).open_input_file(f"{self.bucket}/{self._root}{checked_key(key)}")

    def write_stream(self, key: str, stream: BinaryIO) -> None:
        options = TransferConfig(
            multipart_threshold=_SINGLE_PUT_BYTES, multipart_chunksize=CHUNK_BYTES, max_concurrency=4
        )
        with self._explained(key):
            name = self._name(key)
            self._client.upload_fileobj(stream, name["Bucket"], name["Key"], Config=options)

    def write(self, key: str, data: bytes) -> None:
        with self._explained(key):
            self._client.put_object(**self._name(key), Body=data)

    def create(self, key: str, data: bytes) -> bool:
        for attempt in range(_ATTEMPTS):
            try:
                with self._explained(key):
                    self._client.put_object(**self._name(key), Body=data, IfNoneMatch="*")
                return True
            except StoreError as error:
                code = _code(error.__cause__)
                if code in _EXISTS:
                    return False
                if code not in _CONFLICT or attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(0.2 * 2**attempt)
        raise AssertionError("unreachable")

    def sizes(self, prefix: str = "") -> dict[str, int]:
        return {key: entry["Size"] for key, entry in self.entries(prefix).items()}

    def entries(self, prefix: str = "") -> dict[str, dict[str, Any]]:
        """Key -> S3's listing entry (Size, ETag, …) of the objects at `prefix` or below `prefix/`."""
        prefix = prefix.strip("/")
        found = {}
        with self._explained(prefix):
            for page in self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=self._root + prefix
            ):
                for entry in page.get("Contents", []):
                    key = entry["Key"].removeprefix(self._root)
                    if not prefix or key == prefix or key.startswith(f"{prefix}/"):
                        found[key] = entry
        return dict(sorted(found.items()))

    def size(self, key: str) -> int:
        with self._explained(key):
            return int(self._client.head_object(**self._name(key))["ContentLength"])

    def delete(self, key: str) -> None:
        with self._explained(key):
            self._client.delete_object(**self._name(key))

    def delete_prefix(self, prefix: str) -> None:
        keys = [key for key in self.sizes(prefix) if key != prefix.strip("/")]
        with self._explained(prefix):
            for start in range(0, len(keys), 1000):  # S3's limit for one request
                names = [{"Key": self._root + key} for key in keys[start : start + 1000]]
                answer = self._client.delete_objects(Bucket=self.bucket, Delete={"Objects": names, "Quiet": True})
                for refusal in answer.get("Errors", []):
                    raise StoreError(f"store {self.where}: cannot delete {refusal['Key']} ({refusal.get('Code')})")

    def _name(self, key: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self._root + checked_key(key)}

    @contextmanager
    def _explained(self, key: str) -> Iterator[None]:
        try:
            yield
        except (ClientError, BotoCoreError, Boto3Error) as error:
            code = _code(error) or _code(error.__cause__)
            if code in _MISSING:
                raise FileNotFoundError(f"store {self.where}: no object {key}") from error
            raise StoreError(f"store {self.where}: {key or 'root'}: {error}") from error


def _code(error: BaseException | None) -> str:
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


@functools.lru_cache(maxsize=8)
def _client(settings: S3Settings) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=settings.endpoint,
        region_name=settings.region,
        aws_access_key_id=settings.access_key,
        aws_secret_access_key=settings.secret_key,
        aws_session_token=settings.session_token,
        config=Config(
            retries={"total_max_attempts": _ATTEMPTS, "mode": "standard"},
            connect_timeout=5,
            read_timeout=60,
            s3={"addressing_style": "path"},  # custom endpoints have no DNS name per bucket
        ),
    )


@functools.lru_cache(maxsize=8)
def _filesystem(settings: S3Settings) -> Any:
    return fs.S3FileSystem(
        endpoint_override=settings.endpoint,
        region=settings.region,
        access_key=settings.access_key,
        secret_key=settings.secret_key,
        session_token=settings.session_token,
    )
