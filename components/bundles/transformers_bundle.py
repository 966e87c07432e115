"""A bundle through transformers' own door: `from_pretrained` gives the dual-scale low-bit forward.

    from reflux.components.bundles.transformers_bundle import low_bit_config

    model = AutoModelForCausalLM.from_pretrained(bundle, config=low_bit_config(bundle), dtype=torch.float32)

config.json of a bundle names compressed-tensors, so that runtimes without reflux load the weights; that schema has no
words for two scales or for a position table. The configuration made here names the quantiser "reflux" instead, which
this module registers. `forward="simulated"` rounds in floating point, as in training. `forward="deployed"` multiplies
codes with torch's CPU kernels (algorithms/cpu_kernels.py) and never holds a restored weight; in float32 products are
exact integers, in bfloat16 they are several times faster.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from reflux.components.algorithms.coded_tables import use_coded_tables
from reflux.components.algorithms.cpu_kernels import int4_refusal, use_coded_linears, use_int4_kernels
from reflux.components.algorithms.low_bit import apply_scheme, round_attention
from reflux.components.algorithms.low_bit_embedding import both_ends, require_tables
from reflux.components.bundles import policy_table
from reflux.components.bundles.bundle import (
    dequantized,
    described,
    open_weights,
    read_quant_config,
    read_scheme,
    require_described,
)
from reflux.components.bundles.bundle_digests import require_intact
from reflux.components.bundles.packed_linear import coded_linear
from reflux.components.serve.served_bundle import site_of

METHOD = "reflux"
FORWARDS = ("simulated", "deployed")
STORED = r"\.weight_(packed|scale|shape|zero_point)$"
"""Tensors of a bundle that no module of transformers' skeleton has."""


def low_bit_config(folder: str | Path, forward: str = "simulated") -> Any:
    """The model's configuration, for `from_pretrained(folder, config=…)`. ValueError if the folder is no bundle that
    can be read, or `forward` is not one of FORWARDS.
    """
    if forward not in FORWARDS:
        raise ValueError(f"forward {forward!r}: allowed are {FORWARDS}")
    folder = Path(folder)
    read_scheme(folder)
    with open_weights(folder):  # which transformers would open first, and name nothing
        pass
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    config.quantization_config = {"quant_method": METHOD, "folder": str(folder), "forward": forward}
    return config


def require_kernels(folder: Path) -> None:
    """ValueError that says why the bundle has no forward "deployed", as far as its description tells."""
    config, scheme = read_quant_config(folder), read_scheme(folder)
    if not config["weights"]:
        raise ValueError(f"{folder}: its weights are in full precision, which no low-bit kernel multiplies")
    if scheme.rotates:
        raise ValueError(f"{folder}: turns what enters down_proj, which no low-bit kernel does")
    if not scheme.quantizes_activations:
        with open_weights(folder) as file:
            for name, entry in config["weights"].items():
                outputs = int(file.get_tensor(f"{name}.weight_shape")[0])
                if refusal := int4_refusal(entry["bits"], entry["group_size"], outputs):
                    raise ValueError(
                        f"{folder}: {name} meets full-precision activations, which has no kernel on a CPU; {refusal}"
                    )
    said = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    if name := next((name for name in said.get("ignore", ()) if site_of(name) in config["activations"]), None):
        raise ValueError(f"{folder}: {name} has its weight in full precision, what enters it is rounded")


def load_deployed(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The bundle on low-bit kernels, in eval mode; what is not low-bit computes in `dtype`. ValueError if it has no
    kernels.
    """
    require_kernels(folder)
    return AutoModelForCausalLM.from_pretrained(
        folder, config=low_bit_config(folder, "deployed"), dtype=dtype, local_files_only=True
    )


@register_quantization_config(METHOD)
class BundleQuantizationConfig(QuantizationConfigMixin):
    """Where the bundle lies, and which forward it gets."""

    def __init__(self, folder: str = "", forward: str = "simulated", **_: Any) -> None:
        if not folder:
            raise ValueError("a bundle of reflux: give from_pretrained config=low_bit_config(FOLDER)")
        self.quant_method, self.folder, self.forward = METHOD, folder, forward


@register_quantizer(METHOD)
class BundleQuantizer(HfQuantizer):
    """Leaves the decoder's linears without weights, and a rounded embedding out, while transformers loads everything
    else, and fills them then.
    """

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        folder = Path(self.quantization_config.folder)
        config = read_quant_config(folder)
        with open_weights(folder) as file:
            require_described(file, described(config))
        for name in config["weights"]:
            model.get_submodule(name).register_parameter("weight", None)
        self.tables = both_ends(model) if "tables" in config else {}
        if self.tables:
            require_tables(model)
            of_embedding, of_head = self.tables
            needed = {of_embedding} if model.config.tie_word_embeddings else {of_embedding, of_head}
            if needed != config["tables"].keys():
                raise ValueError(
                    f"quant_config.json: tables {sorted(config['tables'])}; with config.json's tie_word_embeddings "
                    f"{model.config.tie_word_embeddings} they are {sorted(needed)}"
                )
            model.all_tied_weights_keys = {}
        for name in self.tables:
            model.set_submodule(name, nn.Identity())  # transformers would begin them at random
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), STORED}

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        folder = Path(self.quantization_config.folder)
        fill = _deployed if self.quantization_config.forward == "deployed" else _simulated
        require_intact(folder, read_quant_config(folder)["files"])
        for name, table in self.tables.items():
            model.set_submodule(name, table)
        with open_weights(folder) as file:
            return fill(model, folder, file).requires_grad_(False)

    @property
    def is_trainable(self) -> bool:
        return False

    def is_serializable(self) -> bool:
        return False


def _simulated(model: Any, folder: Path, file: Any) -> Any:
    scheme = read_scheme(folder)
    packed = described(read_quant_config(folder))
    for name, value in dequantized(file, packed):
        stem = name.rpartition(".")[0]
        if stem in packed:
            model.get_submodule(stem).weight = nn.Parameter(value.to(model.dtype), requires_grad=False)
    if scheme.rounds_embedding and model.config.tie_word_embeddings:
        embedding, head = both_ends(model).values()
        head.weight = embedding.weight
    return apply_scheme(model, scheme, _policy(folder), on_the_grid=True)


def _deployed(model: Any, folder: Path, file: Any) -> Any:
    require_kernels(folder)
    config, scheme = read_quant_config(folder), read_scheme(folder)
    weights = {name: coded_linear(file, name, entry) for name, entry in config["weights"].items()}
    round_attention(model, scheme)
    if coded := {name: coded_linear(file, name, entry) for name, entry in config.get("tables", {}).items()}:
        use_coded_tables(model, coded, model.dtype)
    if not scheme.quantizes_activations:
        return use_int4_kernels(model, weights, model.dtype)
    site_bits = {site: entry["bits"] for site, entry in config["activations"].items()}
    return use_coded_linears(model, weights, site_bits, scheme.activation, _policy(folder), model.dtype)


def _policy(folder: Path) -> Any:
    scheme = read_scheme(folder)
    return policy_table.decode((folder / "policy_table.bin").read_bytes()) if scheme.needs_policy else None
