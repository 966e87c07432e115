"""Where a training begins that goes on from an earlier one: quantisation-aware distillation first (arXiv 2601.20088),
the student's own rollouts after it (arXiv 2609.26708).

Given is the artifact of an earlier distill as it lies in a store (a folder with its manifest and objects), or its files
by name, with its master weights: a bundle of ours, which has none, is refused. Or a checkpoint of codes
(packed_start.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reflux.components.algorithms.low_bit import Scheme
from reflux.components.algorithms.policies import PositionTable
from reflux.components.artifacts import ArtifactError
from reflux.components.bundles import latent, policy_table
from reflux.components.canonical import sha256_hex
from reflux.components.provenance import from_bytes

from .packed_start import PackedStart, packed_start

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Start:
    """The files of an earlier student."""

    scheme: Scheme
    weights: Path
    table: Path | None

    def policy(self) -> PositionTable | None:
        return None if self.table is None else policy_table.decode(self.table.read_bytes())

    def load_into(self, model: Any, base: str) -> None:
        """Its master weights, into a model under the same scheme. ValueError as in `latent.load_latent`."""
        latent.load_latent(model, self.weights, who="start_uri", base=base)


def find_start(place: Path, scheme: Scheme, *, equalized: bool = False, whole: bool = True) -> Start | PackedStart:
    """The start at `place`, for a training under `scheme`, of a student whose channels may be equalised. Unless its
    weights were left where they are (`whole`), every object is what the manifest says.

    ValueError if there is no student there, deployed weights of ours instead of master weights, one of another scheme,
    or codes of channels that are not equalised for one whose are.
    """
    folder = place.parent if place.name == MANIFEST else place
    if (folder / "quant_config.json").exists():
        raise ValueError(
            f"start_uri {place}: is a bundle, whose deployed weights lie on the grid; a training begins with the "
            "master weights of the distill that it was made from"
        )
    if (folder / "config.json").exists() and not (folder / MANIFEST).exists():
        return packed_start(folder, scheme, equalized=equalized)
    files = _objects(folder, whole) if (folder / MANIFEST).exists() else _named(folder)
    own = Scheme.from_json(json.loads(files["scheme.json"].read_text()))
    if own != scheme:
        raise ValueError(
            f"start_uri {place}: was trained as {json.dumps(own.as_json())}, and this student is "
            f"{json.dumps(scheme.as_json())}; take the same scheme"
        )
    return Start(scheme=own, weights=files[latent.NAME], table=files.get("policy_table.bin"))


def _named(folder: Path) -> dict[str, Path]:
    files = {path.name: path for path in folder.iterdir()} if folder.is_dir() else {}
    for name in ("scheme.json", latent.NAME):
        if name not in files:
            raise ValueError(f"start_uri {folder}: has no {name}; a folder objects/distill/KEY of a store is expected")
    return files


def _objects(folder: Path, whole: bool) -> dict[str, Path]:
    """Name of each file -> the object that holds it, beside the manifest."""
    record = from_bytes((folder / MANIFEST).read_bytes(), str(folder / MANIFEST))
    if record.stage != "distill":
        raise ValueError(f"start_uri {folder}: is an artifact of {record.stage}; a training begins with one of distill")
    files = {}
    for shard in record.shards:
        if shard.name in ("scheme.json", latent.NAME, "policy_table.bin"):
            path = folder / shard.object.rpartition("/")[2]
            if not path.is_file():
                raise ArtifactError(f"start_uri {path}: missing ({shard.name})")
            if (whole or shard.name != latent.NAME) and sha256_hex(path.read_bytes()) != shard.sha256:
                raise ArtifactError(f"start_uri {path}: is not what {MANIFEST} says of {shard.name}")
            files[shard.name] = path
    return files
