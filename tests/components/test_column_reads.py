"""Of a large table in S3 only what is asked for passes the network, and it is verified as if all had."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import attempts
import numpy as np
import pyarrow as pa
import pytest
from servers import fault_proxy, seaweed
from servers.fault_proxy import Proxy

from reflux.components import artifacts, column_reads, tables
from reflux.components.artifacts import Artifact, ArtifactError
from reflux.components.storage import S3Settings, Store

GROUPS, VALUES = 4, 256
ROWS = GROUPS * tables.ROW_GROUP_ROWS_NESTED
SCHEMA = pa.schema(
    [
        pa.field("trace_id", pa.string(), nullable=False),
        *(pa.field(f"wide_{n}", pa.list_(pa.float32(), VALUES), nullable=False) for n in range(4)),
        pa.field("seed", pa.int64(), nullable=False),
    ]
)


def wide_table() -> pa.Table:
    """Four columns of random numbers, 2 MB each, between two narrow ones."""
    rng = np.random.default_rng(7)
    numbers = [pa.array(rng.random(ROWS * VALUES, np.float32)) for _ in range(4)]
    wide = [pa.FixedSizeListArray.from_arrays(values, VALUES) for values in numbers]
    return pa.table([pa.array([f"t{n:06d}" for n in range(ROWS)]), *wide, pa.array(range(ROWS))], schema=SCHEMA)


@pytest.fixture(scope="module")
def proxy(s3: S3Settings) -> Iterator[Proxy]:
    with fault_proxy.in_front_of(s3) as running:
        yield running


@pytest.fixture(scope="module")
def made(s3: S3Settings) -> Artifact:
    output = attempts.writer(Store.open(f"s3://{seaweed.BUCKET}/{uuid.uuid4().hex}", s3))
    output.write_table("rows", wide_table(), SCHEMA)
    output.write_table("few", attempts.training_rows(1), attempts.TRAINING)
    return output.commit({})


@pytest.fixture
def artifact(made: Artifact, proxy: Proxy) -> Artifact:
    """The artifact, read through the proxy, which has seen nothing yet."""
    opened = Artifact.open(Store.open(made.store.uri, proxy.settings), made.stage, made.key)
    proxy.seen.clear()
    return opened


def passed_bytes(proxy: Proxy) -> int:
    return sum(request.down_bytes for request in proxy.seen)


def test_one_column_of_a_wide_table_is_all_that_is_fetched(artifact: Artifact, proxy: Proxy) -> None:
    (shard,) = artifact.shards("rows")
    assert shard.bytes > 8_000_000
    assert artifact.table("rows", ["seed"]).equals(wide_table().select(["seed"]))
    columns = [shard.parts[6 * group + 5][0] for group in range(GROUPS)]
    needed = sum(columns) + shard.parts[-1][0]
    requests = GROUPS + 1
    assert len(proxy.seen) == requests
    assert needed <= passed_bytes(proxy) <= needed + 1_000 * requests  # the heads of the answers
    assert passed_bytes(proxy) < shard.bytes / 100


def test_only_the_row_groups_that_are_asked_for_are_fetched(artifact: Artifact, proxy: Proxy) -> None:
    (shard,) = artifact.shards("rows")
    batches = artifact.batches("rows", ["wide_1", "trace_id"])
    first = next(batches)
    assert first.num_rows == tables.ROW_GROUP_ROWS_NESTED
    assert passed_bytes(proxy) < shard.bytes / GROUPS / 3
    assert len(proxy.seen) == 3, "the footer, and two columns of one group"
    rows = pa.Table.from_batches([first, *batches])
    assert rows.equals(wide_table().select(["wide_1", "trace_id"]))


def test_a_small_table_is_one_request(artifact: Artifact, proxy: Proxy) -> None:
    assert artifact.shards("few")[0].parts == []
    assert artifact.table("few", ["value"]).num_rows == 50
    assert len(proxy.seen) == 1


def test_a_column_that_does_not_exist_is_named(artifact: Artifact) -> None:
    with pytest.raises(ValueError, match="table rows has no column 'sed'; did you mean 'seed'"):
        artifact.table("rows", ["sed"])


def test_parts_cover_the_file_and_the_digest_covers_the_parts(made: Artifact, artifact: Artifact) -> None:
    (shard,) = artifact.shards("rows")
    assert sum(length for length, _ in shard.parts) == shard.bytes
    assert column_reads.parts(pa.py_buffer(artifact.file("rows"))) == shard.parts
    assert artifacts.verify(made.store, made.stage, made.key) == []
    other = attempts.writer(made.store, lr=0.7)
    other.write_table("rows", wide_table(), SCHEMA)
    before = other.commit({}).record
    assert before.shards[0].parts == shard.parts
    before.shards[0].parts[0][1] = "0" * 64
    assert artifacts.Artifact.open(made.store, before.stage, before.key).digest != before.digest


def test_a_changed_byte_is_noticed_by_those_who_read_it(made: Artifact, proxy: Proxy) -> None:
    output = attempts.writer(made.store, lr=0.9)
    output.write_table("rows", wide_table(), SCHEMA)
    copy = output.commit({})
    (shard,) = copy.shards("rows")
    seed_of_group_0 = sum(length for length, _ in shard.parts[:5])
    data = bytearray(copy.file("rows"))
    data[seed_of_group_0 + 20] ^= 1
    made.store.write(shard.object, bytes(data))
    with pytest.raises(ArtifactError, match=rf"{shard.object}: changed \(shard rows\): bytes {seed_of_group_0} to"):
        copy.table("rows", ["seed"])
    assert copy.table("rows", ["trace_id"]).num_rows == ROWS
    with pytest.raises(ArtifactError, match="changed"):
        copy.table("rows")
    data[-20] ^= 1
    made.store.write(shard.object, bytes(data))
    with pytest.raises(ArtifactError, match="changed"):
        copy.table("rows", ["trace_id"])
    made.store.delete(shard.object)
    with pytest.raises(ArtifactError, match=f"{shard.object}: missing"):
        copy.table("rows", ["seed"])
