"""KFP's contract with a container: what a task is asked to do, and how it says what it made.

KFP hands over one JSON document, the executor input, and reads another, the executor output. Both are the same under
kfp.local and under the launcher of a cluster, but the launcher mounts stores as folders (`s3://b/k` is /s3/b/k), makes
no folders under kfp.local, and accepts only numbers and text as metadata.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MOUNTS = {
    "s3": "s3",
    "minio": "minio",
    "gs": "gcs",
}  # scheme of an artifact's URI -> folder where the launcher puts it
_FOR_THE_POD = re.compile(r"pipelinechannel--.*|accelerator_(type|count)")
"""Inputs by which KFP decides on the pod. It hands them to the program too, which declared none of them."""


@dataclass(frozen=True, kw_only=True)
class Location:
    """An artifact of a task: the URI under which KFP knows it, and the local file that holds its bytes."""

    uri: str
    path: Path


@dataclass(frozen=True, kw_only=True)
class ExecutorInput:
    parameters: dict[str, Any]
    inputs: dict[str, Location]
    """Of a list of artifacts each: parts/1, parts/2."""
    outputs: dict[str, Location]
    output_file: Path
    """Where KFP expects the executor output."""


def read(text: str) -> ExecutorInput:
    """Parse the executor input. ValueError if it is not one."""
    try:
        document = json.loads(text)
        inputs, outputs = document.get("inputs", {}), document["outputs"]
        return ExecutorInput(
            parameters={n: v for n, v in inputs.get("parameterValues", {}).items() if not _FOR_THE_POD.fullmatch(n)},
            inputs=_locations(inputs.get("artifacts", {})),
            outputs=_locations(outputs.get("artifacts", {})),
            output_file=Path(outputs["outputFile"]),
        )
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"--executor-input: not KFP's executor input ({type(error).__name__}: {error})") from error


def write_output(output_file: Path, artifacts: Mapping[str, tuple[str, Mapping[str, str | int | float]]]) -> None:
    """Write the executor output: name -> (URI, metadata) of every artifact that was made."""
    document = {
        "parameterValues": {},
        "artifacts": {
            name: {"artifacts": [{"name": name, "uri": uri, "metadata": dict(metadata)}]}
            for name, (uri, metadata) in artifacts.items()
        },
    }
    output_file.parent.mkdir(parents=True, exist_ok=True)
    output_file.write_text(json.dumps(document), encoding="utf-8")


def local_path(uri: str) -> Path:
    """The file behind an artifact's URI. ValueError for a scheme that no launcher mounts."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return Path(uri)
    if scheme not in _MOUNTS:
        raise ValueError(f"artifact {uri!r}: a path or one of {', '.join(f'{s}://' for s in _MOUNTS)} is allowed")
    return Path("/", _MOUNTS[scheme], rest.partition("?")[0])


def _locations(artifacts: Mapping[str, Any]) -> dict[str, Location]:
    found = {}
    for name, given in artifacts.items():
        several = len(given["artifacts"]) > 1
        for number, artifact in enumerate(given["artifacts"], start=1):
            custom = artifact.get("customPath")
            location = Location(uri=artifact["uri"], path=Path(custom) if custom else local_path(artifact["uri"]))
            found[f"{name}/{number}" if several else name] = location
    return found
