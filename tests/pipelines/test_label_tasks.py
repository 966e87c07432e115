"""`reflux label-tasks`: from a run to a labelling project and back, with somebody who labels it in between."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from finished_run import make
from labelled_traces import ANSWERS, trace_row, traces_artifact

from reflux.components.ingest_labels.formats import plain_rows
from reflux.components.ingest_labels.known_traces import Traces
from reflux.components.ingest_labels.resolution import join
from reflux.pipelines import runs
from reflux.pipelines.__main__ import cli
from reflux.pipelines.store import stores

ROWS = [trace_row(*item) for item in ANSWERS.items()]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose teacher has answered, and which got no further."""
    traces = traces_artifact(tmp_path, ROWS)
    folder = make(tmp_path / "data")
    record = runs.read(folder)
    made = {"collect_traces": {"key": traces.key, "digest": traces.digest}}
    ref = stores.StoreRef(kind="directory", uri=str(tmp_path / "store"))
    runs.write(folder, replace(record, status="failed", artifacts=made, store=ref))
    return folder


def invoke(run: Path, *options: str) -> Result:
    return CliRunner().invoke(cli, ["label-tasks", str(run), *options])


def annotated(task: dict[str, Any], config: ElementTree.Element, person: int) -> dict[str, Any]:
    """What Label Studio exports for a task after somebody has used every control of the configuration once."""
    results = []

    def answer(control: ElementTree.Element, index: str) -> None:
        name, to_name = (control.attrib[key].replace("{{idx}}", index) for key in ("name", "toName"))
        response = task["data"]["response"]
        choice = control[0].attrib["value"] if len(control) else ""
        values: dict[str, tuple[str, dict[str, Any]]] = {
            "Rating": ("rating", {"rating": int(control.attrib.get("maxRating", "5")) - int(index or 0)}),
            "Choices": ("choices", {"choices": [choice]}),
            "TextArea": ("textarea", {"text": [f"step {index}"]}),
            "Labels": ("labels", {"start": 0, "end": 3, "text": response[:3], "labels": [choice]}),
        }  # fmt: skip
        kind, value = values[control.tag]
        results.append({"id": name, "from_name": name, "to_name": to_name, "type": kind, "value": value})

    repeater = config.find("Repeater")
    assert repeater is not None
    for control in config:
        if "toName" in control.attrib:
            answer(control, "")
    for index in range(len(task["data"][repeater.attrib["on"].removeprefix("$")])):
        for control in repeater:
            if "toName" in control.attrib:
                answer(control, str(index))
    annotation = {
        "id": 1, "completed_by": person, "was_cancelled": False, "result": results,
        "created_at": "2026-03-09T10:00:00Z",
    }  # fmt: skip
    return {"id": 1, "annotations": [annotation], "predictions": [], **task}


def test_what_is_labelled_comes_back_to_its_traces(run: Path, tmp_path: Path) -> None:
    result = invoke(run, "-o", str(tmp_path / "tasks.json"))
    assert result.exit_code == 0, result.output
    assert result.output.startswith("2 tasks: ")
    tasks = json.loads((tmp_path / "tasks.json").read_text())
    config = ElementTree.parse(tmp_path / "tasks.xml").getroot()
    export = [annotated(task, config, person) for task in tasks for person in (1, 2)]
    (tmp_path / "export.json").write_text(json.dumps(export))

    found = join(plain_rows(tmp_path / "export.json"), Traces(ROWS))
    assert found.rejected == []
    said = {(one.trace_id, one.step): (one.rating, one.overload, one.guardrail, one.comment) for one in found.labels}
    assert said == {
        (row["trace_id"], step): (5 - step, True, False, f"step {step}")
        for row in ROWS
        for step in range(len(row["step_starts"]))
    }
    assert {one.annotator for one in found.labels} == {"1", "2"}
    assert {(mark.trace_id, tuple(mark.positions)) for mark in found.marks} == {(row["trace_id"], (0,)) for row in ROWS}

    later = [row | {"trace_id": f"{row['trace_id']} at another temperature"} for row in ROWS]
    carried = join(plain_rows(tmp_path / "export.json"), Traces(later))
    assert len(carried.labels) == len(found.labels)
    assert {one.matched_by for one in carried.labels} == {"text"}


def test_every_object_of_the_configuration_shows_what_the_tasks_hold(run: Path, tmp_path: Path) -> None:
    invoke(run, "-o", str(tmp_path / "tasks.json"))
    (task, _) = json.loads((tmp_path / "tasks.json").read_text())
    config = ElementTree.parse(tmp_path / "tasks.xml").getroot()
    shown = {element.attrib["value"] for element in config.iter("Text")}
    assert shown == {"$prompt", "$response", "$steps[{{idx}}].text"}
    assert {"prompt", "response", "steps", "trace_id", "prompt_id"} <= task["data"].keys()
    assert "".join(step["text"] for step in task["data"]["steps"]) == task["data"]["response"]
    controls = {element.attrib["toName"] for element in config.iter() if "toName" in element.attrib}
    assert controls <= {element.attrib["name"] for element in config.iter("Text")}


def test_a_small_sample_is_part_of_a_larger_one(run: Path, tmp_path: Path) -> None:
    written = {}
    for limit in ("1", "2"):
        assert invoke(run, "-o", str(tmp_path / "tasks.json"), "--limit", limit).exit_code == 0
        written[limit] = json.loads((tmp_path / "tasks.json").read_text())
    assert written["2"][:1] == written["1"]


def test_what_cannot_be_written_or_is_not_there_is_said(run: Path, tmp_path: Path) -> None:
    for output, message in {"tasks.csv": "must end in .json", "none/tasks.json": "cannot be written"}.items():
        result = invoke(run, "-o", str(tmp_path / output))
        assert result.exit_code == 2
        assert message in result.output
    runs.write(run, replace(runs.read(run), artifacts={}))
    assert "its teacher has not answered yet" in invoke(run, "-o", str(tmp_path / "tasks.json")).output
