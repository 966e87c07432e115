"""Whatever stands in a file of labels: no traceback, no row that vanishes, and every valid one among the labels."""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from labelled_traces import EXPORTS, trace_row

from reflux.components.ingest_labels.agreement import agreement
from reflux.components.ingest_labels.formats import plain_rows
from reflux.components.ingest_labels.known_traces import Traces
from reflux.components.ingest_labels.resolution import Ingested, join
from reflux.components.ingest_labels.samples import hard_samples
from reflux.components.schemas import HARD_SAMPLES, LABELS

STEPS = {"p1": 3, "p2": 1, "p3": 2}
KNOWN = Traces(trace_row(prompt_id, " ".join(["One step."] * steps)) for prompt_id, steps in STEPS.items())
VALID = {"prompt_id": "p1", "annotator": "valid \U0001f600"}

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def objects(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with some of the fields, each as described or anything else."""
    return st.fixed_dictionaries({}, optional={name: values | anything for name, values in fields.items()})


names = st.sampled_from(["rating_0", "rating", "flags_1", "comment_2", "overload_0", "key_tokens", "other"])
spans = objects(start=st.integers(-1, 99), end=st.integers(-1, 99), text=st.text(), labels=st.just(["key"]))
times = st.sampled_from(["2026-03-09T10:00:00Z", "2999-01-01", "never"])
plain = objects(
    prompt_id=st.sampled_from([*STEPS, "p9"]),
    trace_id=st.sampled_from(["trace-of-p1", ""]),
    step=st.integers(-1, 3),
    annotator=st.text(max_size=3),
    rating=st.integers(0, 6),
    overload=st.booleans(),
    submitted_at=times,
    steps=st.lists(st.text(), max_size=3),
    start=st.integers(-1, 99),
    end=st.integers(-1, 99),
    marked_text=st.text(),
)
label_studio = st.fixed_dictionaries(
    {
        "data": objects(trace_id=st.just("trace-of-p1"), steps=st.lists(objects(text=st.text())), response=st.text()),
        "annotations": st.lists(
            objects(
                completed_by=st.integers() | objects(email=st.text()),
                updated_at=times,
                was_cancelled=st.booleans(),
                result=st.lists(
                    objects(
                        type=st.sampled_from(["rating", "choices", "textarea", "labels"]),
                        from_name=names,
                        to_name=st.just("response"),
                        value=objects(rating=st.integers(0, 6), choices=st.just(["overload"])) | spans,
                    ),
                    max_size=3,
                ),
            ),
            max_size=2,
        )
        | anything,
    }
)
argilla = st.fixed_dictionaries(
    {
        "fields": objects(response=st.text()),
        "metadata": objects(trace_id=st.just("trace-of-p1")),
        "responses": st.dictionaries(names, st.lists(objects(value=st.integers(0, 6), user_id=st.text()), max_size=2))
        | st.lists(objects(values=st.dictionaries(names, objects(value=anything))), max_size=2)
        | anything,
    }
) | st.dictionaries(st.sampled_from(["rating_0.responses", "rating_0.responses.users", "id"]), anything)
mlflow = objects(
    tags=objects(**{"reflux.trace_id": st.just("trace-of-p1")}),
    assessments=st.lists(
        objects(
            assessment_name=names,
            source=objects(source_type=st.just("HUMAN"), source_id=st.text()),
            feedback=objects(value=st.floats(0, 6)),
            last_update_time=times,
            rationale=st.text(),
            valid=st.booleans(),
            overrides=st.text(),
        ),
        max_size=3,
    ),
)
noise = anything | plain | label_studio | argilla | mlflow


def ingested(name: str, content: bytes) -> Ingested:
    """What the stage would write must also fit into its tables and metrics."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, name)
        file.write_bytes(content)
        found = join(plain_rows(file), KNOWN)
    pa.Table.from_pylist([asdict(one) for one in found.labels], schema=LABELS)
    pa.Table.from_pylist(hard_samples(found.labels, 2), schema=HARD_SAMPLES)
    alpha = agreement(found.labels).alpha
    assert alpha is None or math.isfinite(alpha)
    return found


def own(found: Ingested) -> list[int]:
    return sorted(one.step for one in found.labels if one.annotator == VALID["annotator"])


@settings(max_examples=150, deadline=None)
@given(others=st.lists(noise, max_size=6), name=st.sampled_from(["jsonl", "json"]), data=st.data())
def test_no_valid_row_is_lost_among_noise(others: list[Any], name: str, data: st.DataObject) -> None:
    valid = [VALID | {"step": step, "rating": step + 1} for step in range(3)]
    rows = data.draw(st.permutations([*others, *valid]))
    text = json.dumps(rows) if name == "json" else "\n".join(json.dumps(row) for row in rows)
    assert own(ingested(f"labels.{name}", text.encode())) == [0, 1, 2]


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(plain | anything, max_size=6))
def test_no_plain_row_vanishes(rows: list[Any]) -> None:
    found = ingested("labels.jsonl", "\n".join(json.dumps(row) for row in rows).encode())
    assert len(found.labels) + len(found.marks) + len(found.rejected) == len(rows)


def outcome(name: str, content: bytes) -> Ingested | str:
    """What is read, or the message of the only kind of error that a file may lead to."""
    try:
        return ingested(name, content)
    except ValueError as error:
        return str(error)


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(["jsonl", "json", "csv", "parquet", "zip", "json.gz"]), content=st.binary(max_size=200))
def test_arbitrary_bytes_give_no_label_or_an_error_that_names_the_file(kind: str, content: bytes) -> None:
    found = outcome(f"labels.{kind}", content)
    assert f"labels.{kind}" in found if isinstance(found, str) else found.labels == []


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(sorted(path.name for path in EXPORTS.glob("*.*") if path.suffix != ".md")),
    begin=st.integers(0, 4000),
    deleted=st.integers(0, 50),
    inserted=st.binary(max_size=5),
)
def test_a_damaged_export_is_an_error_or_has_fewer_labels(name: str, begin: int, deleted: int, inserted: bytes) -> None:
    content = (EXPORTS / name).read_bytes()
    found = outcome(name, content[:begin] + inserted + content[begin + deleted :])
    assert name in found if isinstance(found, str) else len(found.labels) <= 3


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(blacklist_categories=["Cs"])))
def test_arbitrary_text_after_a_csv_row_leaves_it_or_is_a_clear_error(text: str) -> None:
    found = outcome("labels.csv", f"prompt_id,step,annotator,rating\np1,0,ann,4\n{text}".encode())
    assert "labels.csv" in found if isinstance(found, str) else found.labels[0].rating == 4
