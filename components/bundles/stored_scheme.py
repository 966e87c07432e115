"""What the files of anybody's checkpoint say of its quantisation, so that it is counted in true bits.

Bits are counted from the tensors as they lie in the files, whatever groups, widths and zero points config.json names
for them: a checkpoint of several groups is no more work than one of a single group.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from reflux.components.algorithms.effective_bits import Bits
from reflux.components.bundles.packed_linear import PACKED


@dataclass(frozen=True, kw_only=True)
class StoredWeights:
    """Of a checkpoint whose linear layers are packed."""

    costs: dict[str, Bits]
    """Linear layer ('model.layers.3.mlp.down_proj') -> what a weight of it costs."""
    digest: str
    """sha256 of what config.json says of the quantisation."""


def stored_weights(folder: Path) -> StoredWeights | None:
    """The packed weights of a model in Hugging Face layout: integers of compressed-tensors. None: in full precision.

    ValueError for any other quantisation, and where compressed-tensors, which has to unpack it, is not installed.
    """
    said = packed_as(folder)
    if said is None:
        return None
    if importlib.util.find_spec("compressed_tensors") is None:
        raise ValueError(
            f"{folder}/config.json: quantised by compressed-tensors, which is not installed: pip install "
            "compressed-tensors"
        )
    return StoredWeights(
        costs=packed_costs(folder), digest=hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
    )


def packed_as(folder: Path) -> dict[str, Any] | None:
    """What config.json says of packed integer weights of compressed-tensors; None: the model is in full precision.
    ValueError for any other quantisation.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder}: is neither a bundle nor a model, it has no quant_config.json and no config.json")
    said = json.loads(file.read_text(encoding="utf-8")).get("quantization_config")
    if said is None:
        return None
    if said.get("quant_method") != "compressed-tensors" or said.get("format") != "pack-quantized":
        raise ValueError(
            f"{file}: quantised by {said.get('quant_method')!r}, format {said.get('format')!r}; reflux reads "
            "'compressed-tensors' in the format 'pack-quantized', bundles, and models in full precision"
        )
    for name, group in said.get("config_groups", {}).items():
        _require_integers(f"{file}: config_groups.{name}", group)
    return said


def _require_integers(where: str, group: dict[str, Any]) -> None:
    weights = group.get("weights") or {}
    rounds = [kind for kind in ("input_activations", "output_activations") if group.get(kind)]
    if weights.get("type", "int") != "int" or "num_bits" not in weights or rounds:
        of = f"rounds {', '.join(rounds)}" if rounds else f"has weights {weights.get('type')!r}"
        raise ValueError(f"{where}: {of}; groups of integer weights with activations in full precision are allowed")


def packed_costs(folder: Path) -> dict[str, Bits]:
    """Linear layer -> bits of its tensors in the safetensors files, a weight's share of them. ValueError if none is
    packed there.
    """
    costs = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            for stem in sorted(name.removesuffix(PACKED) for name in names if name.endswith(PACKED)):
                costs[stem] = _cost(file, names, stem)
    if not costs:
        raise ValueError(f"{folder}: config.json says pack-quantized, and no tensor {PACKED} is in its files")
    return costs


def _cost(file: Any, names: set[str], stem: str) -> Bits:
    weights = math.prod(file.get_tensor(f"{stem}.weight_shape").tolist())

    def share(*ends: str) -> float:
        tensors = [file.get_tensor(f"{stem}.{end}") for end in ends if f"{stem}.{end}" in names]
        return sum(8 * tensor.numel() * tensor.element_size() for tensor in tensors) / weights

    return Bits(
        code=share("weight_packed"), scale=share("weight_scale", "weight_g_idx"), zero_point=share("weight_zero_point")
    )
