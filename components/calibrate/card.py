"""The model card of a bundle: what a person who did not make it needs to know."""

from __future__ import annotations

from typing import Any

from reflux.components.algorithms.effective_bits import (
    UNQUANTISED,
    cache_cost,
    cost_of_activations,
    cost_of_weights,
    head_channels,
)
from reflux.components.algorithms.kv_forms import FULL_CACHE
from reflux.components.algorithms.layer_bits import FULL_PRECISION
from reflux.components.algorithms.low_bit import Scheme
from reflux.components.serve.served_bundle import SERVED

CARD = """---
library_name: transformers
tags: [reflux, quantized, distilled]
---

# {name}, {scheme_name}

A low-bit student, distilled on its own rollouts by reflux and exported with the rounding it was trained through.

| | |
|---|---|
| weights | {weights} |
| activations | {activations} |
| layers of other bits | {exceptions} |
| KV cache, rotary tables | {cache}, {rope} |
| embedding and lm_head; norms | {embedding}; full precision, {rest} |
| channels, as profiled | {channels} |
| parents | {parents} |

## Use

    pip install -r requirements.txt
    python fallback.py "Why is the sky blue?"               # too many outliers in a prompt: the {weight_only} path
    python calibrate.py queries.txt --report report.json    # perplexity, latency and outliers on your own queries
    {vllm}

In Python, with `runtime/` on the path, `reflux.components.bundles.bundle.load_bundle(folder)` returns the model; pass
it `position_ids`. Low-bit arithmetic is imitated in floating point: the results are those of the low-bit model, the
speed is not.

## Files

| file | holds |
|---|---|
| model.safetensors | packed codes and scales of what the scheme rounds, the rest as it was; deployed weights |
| quant_config.json | the whole quantiser: scheme, every linear, every activation site with its outlier threshold |
| policy_table.bin | main and outlier scale by site and position (only with dual-scale activations) |
| runtime/ | the code that loads all this |
| manifest.json | lineage: parents, digests, versions |

## Limits

Quality is in the run's report, beside the teacher and the undistilled baselines. The student knows what its base
model knew; nothing was checked about its safety. Prompts far from the training prompts deserve a look at
calibrate.py's outlier share first.
"""
VLLM = "PYTHONPATH=runtime vllm serve . --quantization reflux --enforce-eager    # in vLLM, activations rounded as here"


def model_card(name: str, model: Any, scheme: Scheme, parents: dict[str, str], *, equalized: bool = False) -> str:
    """Markdown; `model` is the student, whose layers are counted, `parents` are digests by name. `equalized`: whether
    its channels were rescaled before anything was rounded.
    """
    weights, activations = "full precision", "full precision"
    of_weights, of_activations = cost_of_weights(model, scheme), cost_of_activations(model, scheme)
    if of_weights != UNQUANTISED:
        weights = (
            f"{scheme.weight_bits} bits, {'zero points' if scheme.zero_points else 'symmetric'}, groups of "
            f"{scheme.group_size}: "
            f"effective bits per weight {of_weights}"
        )
    left_out = sorted(scheme.as_json().keys() - SERVED)
    cache = "full precision"
    if scheme.kv_cache != FULL_CACHE:
        cache = f"{scheme.kv_cache}: effective bits per value {cache_cost(scheme.kv_cache, head_channels(model))}"
    if of_activations != UNQUANTISED:
        activations = f"{scheme.activation_bits} bits, {scheme.activation}: effective bits per value {of_activations}"
    return CARD.format(
        name=name,
        scheme_name=f"W{scheme.weight_bits}A{scheme.activation_bits}",
        weight_only=f"W{scheme.weight_bits}A{FULL_PRECISION}",
        vllm=f"# not in vLLM, which does not compute {', '.join(left_out)}" if left_out else VLLM,
        weights=weights,
        activations=activations,
        cache=cache,
        embedding=f"{scheme.embedding_bits} bits" if scheme.rounds_embedding else "full precision",
        rope="full precision" if scheme.rope_bits >= FULL_PRECISION else f"{scheme.rope_bits} bits",
        rest="turned by a Hadamard matrix, as all weights are" if scheme.rotates else "not turned",
        channels="equalised before rounding (profile_kv.equalization_power)" if equalized else "as in the base",
        exceptions=", ".join(f"`{exception}`" for exception in scheme.exceptions) or "none",
        parents=", ".join(f"{parent} `{digest}`" for parent, digest in sorted(parents.items())),
    )
