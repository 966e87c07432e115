"""Equal rows are equal bytes, and what breaks a table's schema is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from reflux.components import tables
from reflux.components.schemas import HARD_SAMPLES, LABELS, TRAINING, traces_topk

TOPK = traces_topk(3, 259)


def traces(count: int) -> list[dict[str, object]]:
    """Rows of the widest table, with answers of different lengths."""
    rng = np.random.default_rng(0)
    rows = []
    for n in range(count):
        length = n % 5
        filled = {
            "language_confidence": 0.5,
            "entity_count": None,
            "prompt_token_ids": [1, 2, 3],
            "anchor_spans": [[1, 3]],
            "response_token_ids": list(range(length)),
            "response_char_ends": list(range(length)),
            "entropy_nats": rng.random(length, np.float32).tolist(),
            "key_token_score": [0.5] * length,
            "step_starts": [0],
            "ends_in_loop": n % 2 == 0,
            "topk_token_ids": rng.integers(0, 99, (length, 3)).tolist(),
            "topk_logprobs": rng.random((length, 3)).astype(np.float16).tolist(),
            "tail_logmass": [-1.0] * length,
        }
        rows.append({name: filled.get(name, f"{name} {n}") for name in TOPK.names})
    return rows


def encoded(table: pa.Table, schema: pa.Schema) -> bytes:
    return tables.encode("example", table, schema).to_pybytes()


def test_bytes_do_not_depend_on_how_the_rows_arrived() -> None:
    table = pa.Table.from_pylist(traces(1200), schema=TOPK)
    pieces = [table.slice(0, 7), table.slice(7, 600), table.slice(607)]
    shuffled_columns = table.select(sorted(table.schema.names, reverse=True))
    expected = encoded(table, TOPK)
    for other in (pa.concat_tables(pieces), shuffled_columns, table.replace_schema_metadata({"x": "y"})):
        assert encoded(other, TOPK) == expected
    assert encoded(table.slice(1), TOPK) == encoded(pa.Table.from_pylist(traces(1200)[1:], schema=TOPK), TOPK)
    one, other = TOPK.with_metadata({"a": "1", "b": "2"}), TOPK.with_metadata({"b": "2", "a": "1"})
    assert encoded(table, one) == encoded(table, other) != expected


def test_a_table_comes_back_whole_or_one_row_group_at_a_time(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(traces(1200), schema=TOPK)
    path = tmp_path / "table.parquet"
    path.write_bytes(encoded(table, TOPK.with_metadata({"tokenizer": "abc"})))
    assert tables.read("example", path, None).equals(table)
    assert tables.metadata(pq.read_schema(path)) == {"tokenizer": "abc"}
    batches = list(tables.batches("example", path, ["trace_id", "topk_logprobs"]))
    assert [batch.num_rows for batch in batches] == [512, 512, 176]
    assert pa.Table.from_batches(batches).equals(table.select(["trace_id", "topk_logprobs"]))
    assert pq.read_schema(path).field("entropy_nats").metadata[b"meaning"]


def test_an_empty_table_is_a_table(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(encoded(TOPK.empty_table(), TOPK))
    assert tables.read("example", tmp_path / "empty", None).num_rows == 0
    assert list(tables.batches("example", tmp_path / "empty", None)) == []


def test_lists_built_without_the_schema_fit_it() -> None:
    """Tables from Python lists name and type the elements of arrays in another way; the values are the same."""
    rows = [{"trace_id": "t", "prompt_id": "p", "ratings": 1, "rating_mean": 2.0, "rating_min": 2, "hard": True}]
    rows[0]["reasons"] = ["low_rating"]  # type: ignore[assignment]
    types = {"ratings": pa.int32(), "rating_mean": pa.float32(), "rating_min": pa.int32()}
    loose = pa.table({name: pa.array([rows[0][name]], types.get(name)) for name in rows[0]})
    assert loose.schema != HARD_SAMPLES
    assert encoded(loose, HARD_SAMPLES) == encoded(pa.Table.from_pylist(rows, schema=HARD_SAMPLES), HARD_SAMPLES)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"step": pa.array([1], pa.int64())}, "table example, column 'step': int64 was given, int32 is the contract"),
        ({"value": None}, r"table example: columns \['value'\] are missing"),
        ({"valeu": pa.array([1.0])}, r"table example: columns \['valeu'\] are not in its schema"),
        ({"phase": pa.array([None], pa.string())}, "table example, column 'phase': 1 rows are null"),
    ],
)
def test_a_column_that_breaks_the_schema_is_named(columns: dict[str, pa.Array | None], message: str) -> None:
    good = {"step": pa.array([1], pa.int32()), "phase": ["joint"], "metric": ["loss_nats"], "value": [0.5]}
    given = {name: column for name, column in (good | columns).items() if column is not None}
    with pytest.raises(ValueError, match=message):
        encoded(pa.table(given), TRAINING)


def test_nulls_are_refused_within_arrays_and_kept_where_they_are_allowed() -> None:
    rows = traces(2)
    rows[1]["entropy_nats"] = [None]
    with pytest.raises(ValueError, match=r"table example.*null"):
        encoded(pa.Table.from_pylist(rows, schema=TOPK), TOPK)
    label = dict.fromkeys(LABELS.names, 1) | {"trace_id": "t", "prompt_id": "p", "annotator": "a", "comment": None}
    label |= {"submitted_at": None, "matched_by": "trace_id", "carried_from": None}
    table = pa.Table.from_pylist([label | {"overload": False, "guardrail": False}], schema=LABELS)
    assert tables.read("example", pa.BufferReader(encoded(table, LABELS)), None).to_pylist()[0]["comment"] is None


def test_an_unknown_column_is_refused_with_the_nearest_known_one() -> None:
    data = encoded(TRAINING.empty_table(), TRAINING)
    with pytest.raises(ValueError, match="table example has no column 'vlaue'; did you mean 'value'"):
        tables.read("example", pa.BufferReader(data), ["step", "vlaue"])


def test_a_fingerprint_covers_names_types_and_nullability_but_not_the_prose() -> None:
    base = tables.fingerprint(TRAINING)
    field = TRAINING.field("step")
    for other in (field.with_name("stop"), field.with_type(pa.int64()), field.with_nullable(True)):
        assert tables.fingerprint(TRAINING.set(0, other)) != base
    assert tables.fingerprint(TRAINING.set(0, field.with_metadata({"meaning": "reworded"}))) == base
    assert tables.fingerprint(traces_topk(3, 259)) != tables.fingerprint(traces_topk(4, 259))
