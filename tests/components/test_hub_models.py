"""A model of the hub, by the hub's own library: whole, or known by the headers of its weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from servers import hub_server

NAME = "team/student"
PROGRAM = """
import json, sys
from reflux.components import sources
from reflux.components.storage import S3Settings
uri, weights = sys.argv[1:]
try:
    path = sources.fetch(uri, weights=weights == "whole")
    told = {"path": str(path), "bytes": sources.bytes_to_fetch(uri, S3Settings.from_env())}
except ValueError as error:
    told = {"error": str(error)}
print(json.dumps(told))
"""


def fetched(endpoint: str, folder: Path, weights: str, uri: str = NAME) -> dict[str, Any]:
    """In a process of its own: the library reads the environment when it is imported."""
    environment = {
        **os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "hub"), "REFLUX_CACHE": str(folder / "reflux"),
        "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, uri, weights], env=environment, capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_model_is_looked_at_without_its_weights_and_fetched_whole(tmp_path: Path, tiny_model: Path) -> None:
    from reflux.components.model_files import require_model_files

    weights = tiny_model / "model.safetensors"
    with hub_server.serving(NAME, tiny_model) as hub:
        looked = fetched(hub.url, tmp_path, "headers")
        folder = Path(looked["path"])
        require_model_files(folder)
        assert folder.name == "student"
        assert (folder / weights.name).stat().st_size == weights.stat().st_size
        assert hub.sent[weights.name] < weights.stat().st_size / 4, "only the header"
        others = {name: data for name, data in contents(tiny_model).items() if name != weights.name}
        assert {name: data for name, data in contents(folder).items() if name != weights.name} == others
        assert looked["bytes"] == sum(path.stat().st_size for path in tiny_model.iterdir())
        sent = dict(hub.sent)
        assert fetched(hub.url, tmp_path, "headers") == looked
        assert hub.sent == sent, "made once"

        whole = fetched(hub.url, tmp_path, "whole")
        assert contents(Path(whole["path"])) == contents(tiny_model)
    assert fetched(hub.url, tmp_path, "headers") == {**whole, "bytes": 0}, "the hub is away: what is here serves"
    assert "the Hugging Face hub does not give it" in fetched(hub.url, tmp_path / "empty", "headers")["error"]


def test_a_model_that_the_hub_does_not_have(tmp_path: Path, tiny_model: Path) -> None:
    with hub_server.serving(NAME, tiny_model) as hub:
        for weights in ("headers", "whole"):
            told = fetched(hub.url, tmp_path, weights, uri="team/teacher")
            assert told["error"].startswith("source team/teacher: no such path here, and the Hugging Face hub does not")
