"""The delivered bundle: how a trained low-bit student is laid out in files, and how those files become a model again.

    config.json, tokenizer…   the base model's own, with compressed-tensors' quantization_config
    generation_config.json    the base model's own: how it samples, and the tokens that end an answer
    model.safetensors         decoder linears and a low-bit embedding packed (packed_linear.py); the rest as it was
    quant_config.json         the whole quantiser: scheme, per linear and per activation site
    policy_table.bin          the position table (policy_table.py)
    runtime/                  these very modules, so that calibrate.py and fallback.py need no installed reflux

A bundle holds the *deployed* weights: they are on the grid and are never rounded again. Master weights ("latent") are
refused here, since taking one for the other fails silently. Nothing in a bundle executes on load.

Shapes: O outputs, I inputs, G groups.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from reflux.components.algorithms.cpu_kernels import CodedWeight
from reflux.components.algorithms.layer_bits import FULL_PRECISION, TERNARY, stored_bits
from reflux.components.algorithms.low_bit import Scheme, apply_scheme, bits_of_sites, bits_of_weights, decoder_layers
from reflux.components.algorithms.low_bit_embedding import table_codes, tables
from reflux.components.algorithms.quantizers import weight_codes, weight_values, zero_points
from reflux.components.bundles import policy_table
from reflux.components.bundles.bundle_digests import require_intact
from reflux.components.bundles.packed_linear import BESIDE, PACKED, coded_linear, packed_linear

FORMAT = "reflux-bundle/1"
PARTS = ("scheme", "scheme_sha256", "weights", "activations", "files")
"""Of quant_config.json, without which no bundle is loaded."""


def deployed_state(model: Any, scheme: Scheme) -> dict[str, torch.Tensor]:
    """The tensors of model.safetensors for a model under `scheme`: decoder linears packed, everything else as it is.

    `model` is the trained student (apply_scheme'd, with master weights); codes and scales are those of its own forward.
    """
    linears, rounded_tables = quantized_bits(model, scheme), described_tables(model, scheme)
    tied = model.config.tie_word_embeddings
    trained = {name: value.detach() for name, value in model.state_dict().items()}
    state: dict[str, torch.Tensor] = {}
    for name, value in trained.items():
        if held_elsewhere(name) or (tied and name == "lm_head.weight"):
            continue
        stem = name.removesuffix(".weight")
        if stem in linears:
            clip_OG, zero_OG = trained[f"{stem}.log_clip_OG"], trained.get(f"{stem}.zero_OG")
            state |= packed_linear(stem, _coded(value, linears[stem], scheme, clip_OG, zero_OG))
        elif stem in rounded_tables and name.endswith(".weight"):
            codes_VD, scale_V1 = table_codes(value)
            state |= packed_linear(stem, CodedWeight(bits=scheme.embedding_bits, codes_OI=codes_VD, scale_OG=scale_V1))
        else:
            state[name] = value.clone()
    return state


def _coded(
    weight_OI: torch.Tensor, bits: int, scheme: Scheme, clip_OG: torch.Tensor, zero_OG: torch.Tensor | None
) -> CodedWeight:
    if zero_OG is None and scheme.has_zero_points(bits):
        zero_OG = zero_points(weight_OI, bits, scheme.group_size)
    codes_OI, scale_OG = weight_codes(weight_OI, bits, scheme.group_size, clip_OG, zero_OG)
    return CodedWeight(bits=bits, codes_OI=codes_OI, scale_OG=scale_OG, zero_OG=zero_OG)


def held_elsewhere(name: str) -> bool:
    """Whether a parameter of the trained model has no tensor in model.safetensors: the position table has a file of its
    own, clipping and zero points of a weight lie beside its codes.
    """
    return name.startswith("policy.") or name.endswith((".log_clip_OG", ".zero_OG"))


def quantized_bits(model: Any, scheme: Scheme) -> dict[str, int]:
    """Name of each linear layer whose weight is low-bit under `scheme`, or will be -> its bits."""
    prefix = next(name for name, module in model.named_modules() if module is decoder_layers(model))
    bits = bits_of_weights(model, scheme)
    return {name.replace("layers", prefix, 1): n for name, n in bits.items() if n < FULL_PRECISION}


def described_tables(model: Any, scheme: Scheme) -> dict[str, dict[str, Any]]:
    """Embedding and head in quant_config.json, as linears are described there; none if the scheme leaves them."""
    found = tables(model) if scheme.rounds_embedding else {}
    return {
        name: {
            "bits": scheme.embedding_bits,
            "codes": "integer",
            "group_size": table.weight.shape[1],
            "zero_point": 0,
            "scale": f"{name}.weight_scale",
        }
        for name, table in found.items()
    }


def compressed_tensors_config(model: Any, scheme: Scheme) -> dict[str, Any]:
    """quantization_config of config.json: what compressed-tensors can say of the scheme, which is the weights. A group
    for each width, with and without zero points: the scheme's own is that of every Linear, others name their layers;
    those in full precision are ignored. ValueError if no weight is low-bit.
    """
    of_linear = {
        name: (stored_bits(bits), not scheme.has_zero_points(bits))
        for name, bits in quantized_bits(model, scheme).items()
    }
    if not of_linear:
        raise ValueError("compressed-tensors: no weight of the model is low-bit")
    own = (scheme.weight_bits, not scheme.zero_points)
    targets = {own: ["Linear"]} if own in of_linear.values() else {}
    for name, kind in of_linear.items():
        if kind != own:
            targets.setdefault(kind, []).append(name)
    every = quantized_bits(model, Scheme(weight_bits=2))
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", *(name for name in every if name not in of_linear)],
        "config_groups": {
            f"group_{index}": {"targets": names, "weights": _group(*kind, scheme.group_size)}
            for index, (kind, names) in enumerate(targets.items())
        },
    }


def _group(bits: int, symmetric: bool, group_size: int) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "int",
        "strategy": "group",
        "group_size": group_size,
        "symmetric": symmetric,
        "dynamic": False,
    }


def quant_config(model: Any, scheme: Scheme, thresholds: dict[str, float], fallback_share: float) -> dict[str, Any]:
    """The content of quant_config.json. `thresholds`: site that rounds -> |x| above which a token counts as an outlier
    there.
    """
    weights = {
        name: {
            "bits": stored_bits(bits),
            "codes": "ternary" if bits == TERNARY else "integer",
            "group_size": scheme.group_size,
            "zero_point": f"{name}.weight_zero_point" if scheme.has_zero_points(bits) else 0,
            "scale": f"{name}.weight_scale",
        }
        for name, bits in quantized_bits(model, scheme).items()
    }
    scales_SP2 = model.policy.scales() if model.policy is not None else None
    of_site = bits_of_sites(model, scheme)
    sites = {
        site: {"bits": of_site[site], "outlier_threshold": threshold}
        | (
            {}
            if scales_SP2 is None
            else {
                "scale_main": scales_SP2[model.policy.index[site], :, 0].tolist(),
                "scale_outlier": scales_SP2[model.policy.index[site], :, 1].tolist(),
            }
        )
        for site, threshold in thresholds.items()
    }
    return {
        "format": FORMAT,
        "checkpoint": "deployed",
        "scheme": scheme.as_json(),
        "scheme_sha256": scheme.digest(),
        "position_knots": list(model.policy.knots) if model.policy is not None else [],
        "fallback_outlier_share": fallback_share,
        "weights": weights,
        "activations": sites,
    } | ({"tables": described_tables(model, scheme)} if scheme.rounds_embedding else {})


def read_quant_config(folder: Path) -> dict[str, Any]:
    """quant_config.json of a bundle. ValueError if the folder is no bundle, of another format, not whole, or not
    deployed weights.
    """
    path = folder / "quant_config.json"
    if not path.is_file():
        raise ValueError(f"{folder}: is no bundle, it has no quant_config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON, it was changed or cut short ({error})") from None
    if config.get("format") != FORMAT:
        raise ValueError(f"{path}: format {config.get('format')!r}, this reflux reads {FORMAT}")
    if config.get("checkpoint") != "deployed":
        raise ValueError(
            f"{path}: checkpoint {config.get('checkpoint')!r}, a bundle holds deployed weights, not latent ones"
        )
    if missing := [name for name in PARTS if name not in config]:
        raise ValueError(f"{path}: has no {missing[0]!r}, it was changed")
    return config


def read_scheme(folder: Path) -> Scheme:
    """How the bundle's model is quantised. ValueError if the scheme does not have the digest that is recorded with
    it.
    """
    config = read_quant_config(folder)
    scheme = Scheme.from_json(config["scheme"])
    if scheme.digest() != config["scheme_sha256"]:
        raise ValueError(f"{folder}/quant_config.json: scheme_sha256 is not that of the scheme beside it")
    return scheme


def open_weights(folder: Path) -> Any:
    """The bundle's model.safetensors, opened. ValueError if it is cut short, or holds master weights."""
    path = folder / "model.safetensors"
    try:
        file = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: cannot be read as safetensors ({error})") from error
    if (file.metadata() or {}).get("checkpoint") == "latent":
        raise ValueError(f"{path}: holds latent master weights, not deployed ones")
    return file


def load_bundle(folder: Path) -> Any:
    """The deployed model of a bundle, in eval mode: weights from the packed codes, activations rounded as in
    training.
    """
    scheme, packed = read_scheme(folder), described(read_quant_config(folder))
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # read here, not by transformers
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing = set(model.state_dict()) - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    with open_weights(folder) as file:
        state = dict(dequantized(file, packed))
    if missing != state.keys():
        raise ValueError(
            f"{folder}/model.safetensors: does not fit config.json; differing: {sorted(missing ^ state.keys())[:3]}"
        )
    require_intact(folder, read_quant_config(folder)["files"])
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    policy = policy_table.decode((folder / "policy_table.bin").read_bytes()) if scheme.needs_policy else None
    return apply_scheme(model, scheme, policy, on_the_grid=True).eval().requires_grad_(False)


def described(quant_config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What model.safetensors has packed, by name: linears, and embedding and head where they are rounded. ValueError if
    the tables are not those of the scheme.
    """
    tables, bits = quant_config.get("tables") or {}, quant_config["scheme"].get("embedding_bits", FULL_PRECISION)
    if bool(tables) != (bits < FULL_PRECISION) or any(entry["bits"] != bits for entry in tables.values()):
        of_bits = sorted({entry["bits"] for entry in tables.values()})
        raise ValueError(
            f"quant_config.json: tables {sorted(tables)} of {of_bits} bits, the scheme has embedding_bits {bits}; "
            "it was changed"
        )
    return quant_config["weights"] | tables


def require_described(file: Any, packed: Iterable[str]) -> None:
    """ValueError unless what is packed in model.safetensors is what `described` names."""
    stems = {name.removesuffix(PACKED) for name in file.keys() if name.endswith(PACKED)}  # noqa: SIM118  no mapping
    if unknown := sorted(stems - set(packed)):
        raise ValueError(f"quant_config.json: {unknown[0]} is packed in model.safetensors and not described")
    if missing := sorted(set(packed) - stems):
        raise ValueError(f"quant_config.json: describes {missing[0]}, which is not packed in model.safetensors")


def dequantized(file: Any, packed: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of every parameter in model.safetensors. `packed` are those of `described`; ValueError if the file
    has others.
    """
    require_described(file, packed)
    for name in file.keys():  # noqa: SIM118  a safetensors file is no mapping
        if name.endswith(PACKED):
            stem = name.removesuffix(PACKED)
            coded = coded_linear(file, stem, packed[stem])
            yield f"{stem}.weight", weight_values(coded.codes_OI, coded.scale_OG, coded.zero_OG)
        elif not name.endswith(BESIDE):
            yield name, file.get_tensor(name)
