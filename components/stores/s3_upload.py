"""A stream of any length into one object of S3: one request if it is short, else parts that are each sent until they
arrive.

boto3's own upload cannot repeat a part of a stream once its attempts are used up. Here a part stays in memory until the
server has it, so a store that was away for a while costs time and nothing else.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, BinaryIO

from botocore.exceptions import ClientError

from reflux.components.storage import CHUNK_BYTES
from reflux.components.stores.s3_errors import FAILURES, NO_UPLOAD, Patience, code, patiently

SINGLE_PUT_BYTES = 16 << 20
MOST_PARTS = 10_000  # S3's limit
_AT_ONCE = 4  # parts under way: with the one being read, 40 MiB of memory


def upload(
    client: Any, name: Mapping[str, str], stream: BinaryIO, patience: Callable[[], Patience],
    sha256: Callable[[], str],
) -> None:  # fmt: skip
    """Store the stream under `name` (Bucket, Key). `sha256` hashes what is stored there now.

    ValueError if it is longer than MOST_PARTS parts.
    """
    head = _take(stream, SINGLE_PUT_BYTES)
    if len(head) < SINGLE_PUT_BYTES:
        patiently(lambda: client.put_object(**name, Body=head), patience())
        return
    started = patiently(lambda: client.create_multipart_upload(**name), patience())
    place = {**name, "UploadId": started["UploadId"]}
    digest = hashlib.sha256()
    try:
        parts = _send(client, place, _cut(head, stream, digest), patience)
        _complete(client, place, parts, patience(), lambda: sha256() == digest.hexdigest())
    except BaseException:
        with suppress(*FAILURES):  # what is left of it then, `reflux store gc` removes
            client.abort_multipart_upload(**place)
        raise


def _send(
    client: Any, place: Mapping[str, str], parts: Iterator[bytes], patience: Callable[[], Patience]
) -> list[dict[str, Any]]:
    def send(number: int, data: bytes) -> dict[str, Any]:
        answer = patiently(lambda: client.upload_part(**place, PartNumber=number, Body=data), patience())
        return {"PartNumber": number, "ETag": answer["ETag"]}

    sent: list[dict[str, Any]] = []
    under_way: deque[Future[dict[str, Any]]] = deque()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            for number, data in enumerate(parts, 1):
                if number > MOST_PARTS:
                    limit = MOST_PARTS * CHUNK_BYTES
                    raise ValueError(f"object {place['Key']}: at most {limit:,} bytes fit into one object; split it")
                under_way.append(pool.submit(send, number, data))
                if len(under_way) == _AT_ONCE:
                    sent.append(under_way.popleft().result())
            return sent + [future.result() for future in under_way]
        finally:
            for future in under_way:
                future.cancel()


def _complete(
    client: Any, place: Mapping[str, str], parts: list[dict[str, Any]], patience: Patience, stored: Callable[[], bool]
) -> None:
    repeated = False
    while True:
        try:
            client.complete_multipart_upload(**place, MultipartUpload={"Parts": parts})
            return
        except FAILURES as error:
            # the answer to an earlier attempt may have been lost: then the upload is over, and the object is ours
            if repeated and isinstance(error, ClientError) and code(error) in NO_UPLOAD and stored():
                return
            patience.wait(error)
            repeated = True


def _cut(head: bytes, stream: BinaryIO, digest: Any) -> Iterator[bytes]:
    for start in range(0, len(head), CHUNK_BYTES):
        part = head[start : start + CHUNK_BYTES]
        digest.update(part)
        yield part
    while part := _take(stream, CHUNK_BYTES):
        digest.update(part)
        yield part


def _take(stream: BinaryIO, size: int) -> bytes:
    """The next `size` bytes, fewer only at the end."""
    pieces = []
    while size and (piece := stream.read(size)):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)
