"""A real Label Studio server, by hand: it takes the project that label-tasks writes, and its export comes back whole.

    LABEL_STUDIO_ENABLE_LEGACY_API_TOKEN=true label-studio start --no-browser --port 8080 \\
        --username expert@example.org --password … --user-token TOKEN
    REFLUX_LABEL_STUDIO_URL=http://127.0.0.1:8080 REFLUX_LABEL_STUDIO_TOKEN=TOKEN \\
        .venv/bin/pytest -s -m heavy tests/components/ingest_labels/test_label_studio_server.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx2
import pytest
from labelled_traces import ANSWERS, trace_row, traces_artifact
from stage_writers import writer_for

from reflux.components.ingest_labels.config import IngestLabelsConfig
from reflux.components.ingest_labels.stage import run
from reflux.components.ingest_labels.tasks import LABELLING_CONFIG, tasks

URL = os.environ.get("REFLUX_LABEL_STUDIO_URL", "")

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not URL, reason="REFLUX_LABEL_STUDIO_URL names no server; the module's docstring starts one"),
]


def test_what_experts_say_in_label_studio_comes_back(tmp_path: Path) -> None:
    traces = traces_artifact(tmp_path, [trace_row(*item) for item in ANSWERS.items()])
    made = tasks(traces.table("traces").to_pylist())
    with httpx2.Client(
        base_url=f"{URL}/api", headers={"Authorization": f"Token {os.environ['REFLUX_LABEL_STUDIO_TOKEN']}"}, timeout=60
    ) as server:
        project = asked(server, "POST", "/projects", {"title": "reflux", "label_config": LABELLING_CONFIG.read_text()})[
            "id"
        ]
        asked(server, "POST", f"/projects/{project}/import", made)
        for task in asked(server, "GET", f"/tasks?project={project}&fields=all")["tasks"]:
            asked(server, "POST", f"/tasks/{task['id']}/annotations", {"result": annotation(task["data"])})
        export = server.get(f"/projects/{project}/export?exportType=JSON").raise_for_status().content
        asked(server, "DELETE", f"/projects/{project}")
    (tmp_path / "export.json").write_bytes(export)

    config = IngestLabelsConfig(labels_uri=str(tmp_path / "export.json"))
    writer = writer_for(tmp_path / "store", "ingest_labels", config, traces=traces)
    labels = writer.commit(run(config, traces=traces, labels=writer))
    assert labels.table("rejected").num_rows == 0
    rated = {(row["trace_id"], row["step"]): row["rating"] for row in labels.table("labels").to_pylist()}
    assert rated == {
        (task["data"]["trace_id"], step): 1 + step % 5 for task in made for step in range(len(task["data"]["steps"]))
    }
    assert {row["trace_id"] for row in labels.table("key_tokens").to_pylist()} == {
        task["data"]["trace_id"] for task in made
    }


def asked(server: httpx2.Client, method: str, path: str, body: Any = None) -> Any:
    answer = server.request(method, path, json=body)
    assert answer.is_success, f"{path}: {answer.status_code} {answer.text[:500]}"
    return json.loads(answer.content or b"null")


def annotation(data: dict[str, Any]) -> list[dict[str, Any]]:
    """A rating for every step, and the answer's first word marked."""
    ratings = [
        {"from_name": f"rating_{step}", "to_name": f"step_{step}", "type": "rating", "value": {"rating": 1 + step % 5}}
        for step in range(len(data["steps"]))
    ]
    word = data["response"].split()[0]
    start = data["response"].index(word)
    mark = {"start": start, "end": start + len(word), "text": word, "labels": ["key"]}
    return [*ratings, {"from_name": "key_tokens", "to_name": "response", "type": "labels", "value": mark}]
