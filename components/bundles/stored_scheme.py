"""What config.json says of a checkpoint's quantisation, so that anybody's low-bit model is counted in true bits."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from reflux.components.algorithms.low_bit import FULL_PRECISION, Scheme


def stored_scheme(folder: Path) -> Scheme:
    """The scheme of a model in Hugging Face layout: full precision, or integers of compressed-tensors in groups.

    ValueError for any other quantisation, and where compressed-tensors, which has to unpack it, is not installed.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder}: is neither a bundle nor a model, it has no quant_config.json and no config.json")
    said = json.loads(file.read_text(encoding="utf-8")).get("quantization_config")
    if said is None:
        return Scheme(weight_bits=FULL_PRECISION, activation_bits=FULL_PRECISION)
    if said.get("quant_method") != "compressed-tensors" or said.get("format") != "pack-quantized":
        raise ValueError(
            f"{file}: quantised by {said.get('quant_method')!r}, format {said.get('format')!r}; reflux evaluates "
            "'compressed-tensors' in the format 'pack-quantized', bundles, and models in full precision"
        )
    groups = list(said["config_groups"].values())
    if len(groups) != 1 or groups[0].get("input_activations") or not groups[0]["weights"].get("group_size"):
        raise ValueError(
            f"{file}: config_groups: one group of weights with a group_size, without activations, is allowed"
        )
    if importlib.util.find_spec("compressed_tensors") is None:
        raise ValueError(
            f"{file}: quantised by compressed-tensors, which is not installed: pip install compressed-tensors"
        )
    weights = groups[0]["weights"]
    return Scheme(weight_bits=weights["num_bits"], group_size=weights["group_size"], activation_bits=FULL_PRECISION)
