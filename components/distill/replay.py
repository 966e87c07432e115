"""A step that could not be made, kept so that it can be made again: its sequences, the weights as they stood, and the
configuration. Nothing in it executes on load.

    sequences.safetensors   the teacher's stored distributions, "<number>.teacher.<field>"
    weights.safetensors     every trained parameter before the step; with adapters on weights that no source has, all
    policy_table.bin        the position table's sites and scales, where there is one
    replay.json             the rest of each sequence, the step, its message and share of the teacher, configuration and
                            versions
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from reflux.components import declare, environment, processes
from reflux.components.artifacts import Writer
from reflux.components.bundles import policy_table
from reflux.components.provenance import public_uri

from . import parallel
from .config import DistillConfig
from .examples import Sequence
from .stored import StoredBuckets, StoredDraws
from .trainer import NotFiniteError, Trainer

FORMAT = "reflux-replay/3"
SOURCES = ("teacher", "student_uri")
TEACHERS = {kind.__name__: kind for kind in (StoredBuckets, StoredDraws)}


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What `read` finds."""

    step: int
    message: str
    teacher_weight: float
    config: DistillConfig
    compute_dtype: str
    sources: dict[str, str]
    """Field of the configuration -> digest of the model behind it."""
    sequences: list[Sequence]
    weights: dict[str, torch.Tensor]
    policy: Any


def keep(student: Writer, trainer: Trainer, error: NotFiniteError, folder: Path) -> str:
    """Put the step into the store; where it lies there. Every process has to call it."""
    tensors: dict[str, torch.Tensor] = {}
    described = [_described(sequence, str(number), tensors) for number, sequence in enumerate(error.sequences)]
    record = {
        "format": FORMAT,
        "step": trainer.step + 1,
        "message": str(error),
        "teacher_weight": error.teacher_weight,
        "config": {name: _public(value) for name, value in asdict(trainer.config).items()},
        "sources": {name: student.source_digest(name) for name in SOURCES},
        "compute_dtype": str(trainer.loss.compute_dtype).removeprefix("torch."),
        "sequences": described,
        "versions": environment.versions(),
    }
    names = ["sequences.safetensors", "weights.safetensors", "replay.json"]
    with parallel.whole(trainer.student):
        if processes.is_first():
            named = dict(trainer.student.named_parameters())
            moved = trainer.config.start_uri or getattr(trainer.student, "is_equalized", False)
            needed = named if moved and trainer.config.lora_rank else trainer.trained()  # adapters stand on no source
            weights = {name: named[name].detach().contiguous() for name in needed}
            save_file(tensors, folder / "sequences.safetensors")
            save_file(weights, folder / "weights.safetensors")
            (folder / "replay.json").write_text(json.dumps(record))
            if trainer.policy:
                (folder / "policy_table.bin").write_bytes(policy_table.encode(trainer.student.policy))
                names.append("policy_table.bin")
    files = {name: folder / name for name in names} if processes.is_first() else {}
    return student.keep_failure(trainer.step + 1, files)


def read(folder: Path) -> Replay:
    """What `keep` wrote, from a folder. ValueError if it is of another format or lacks something."""
    try:
        record = json.loads((folder / "replay.json").read_text())
        tensors, weights = (load_file(folder / f"{name}.safetensors") for name in ("sequences", "weights"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}: holds no step that was kept ({error})") from error
    if record.get("format") != FORMAT:
        raise ValueError(f"{folder}/replay.json: format {record.get('format')!r}, this reflux reads {FORMAT}")
    table = folder / "policy_table.bin"
    return Replay(
        step=record["step"],
        message=record["message"],
        teacher_weight=record["teacher_weight"],
        config=declare.from_mapping(DistillConfig, record["config"]),
        compute_dtype=record["compute_dtype"],
        sources=record["sources"],
        sequences=[_sequence(each, str(number), tensors) for number, each in enumerate(record["sequences"])],
        weights=weights,
        policy=policy_table.decode(table.read_bytes()) if table.exists() else None,
    )


def _public(value: Any) -> Any:
    return public_uri(value) if isinstance(value, str) else value


def _described(value: Any, prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A dataclass as JSON; its tensors go into `tensors`."""
    described: dict[str, Any] = {}
    for each in fields(value):
        content = getattr(value, each.name)
        if isinstance(content, torch.Tensor):
            tensors[f"{prefix}.{each.name}"] = content.clone()  # a trace may be in a step twice
        elif is_dataclass(content):
            described[each.name] = {"kind": type(content).__name__} | _described(
                content, f"{prefix}.{each.name}", tensors
            )
        else:
            described[each.name] = content
    return described


def _sequence(described: dict[str, Any], prefix: str, tensors: dict[str, torch.Tensor]) -> Sequence:
    stored = described.get("teacher")
    if stored is not None:
        begin = f"{prefix}.teacher."
        own = {name.removeprefix(begin): tensor for name, tensor in tensors.items() if name.startswith(begin)}
        described = described | {"teacher": TEACHERS[stored["kind"]](**own)}
    return Sequence(**described)
