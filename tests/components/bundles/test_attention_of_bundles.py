"""What a scheme does to attention, and a rotation, arrive in a bundle, by each of its doors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_bundle import write_tiny_bundle
from transformers import AutoModelForCausalLM

from reflux.components.algorithms.kv_forms import KV_FORMS
from reflux.components.algorithms.low_bit import apply_scheme, full_precision_activations
from reflux.components.bundles.bundle import load_bundle, read_scheme
from reflux.components.bundles.transformers_bundle import load_deployed, low_bit_config, require_kernels
from reflux.components.models import load_model

SCHEMES: dict[str, dict[str, Any]] = {
    "cache": {"activation": "plain", "kv_cache": "kivi2", "rope_bits": 8},
    "turned": {"activation": "plain", "rotation": "hadamard", "kv_cache": "int4"},
    "weights": {"activation_bits": 16, "kv_cache": "int8"},
}


@pytest.fixture(scope="module", params=SCHEMES)
def bundle(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bundle(tmp_path_factory.mktemp(request.param) / "bundle", tiny_model, **SCHEMES[request.param])


def inputs() -> dict[str, torch.Tensor]:
    tokens = torch.arange(120)
    return {"input_ids": (3 + tokens * 7 % 256)[None], "position_ids": tokens[None]}


@torch.no_grad()
def test_a_bundle_is_the_forward_that_was_trained(bundle: Path, tiny_model: Path) -> None:
    scheme = read_scheme(bundle)
    trained = apply_scheme(load_model(tiny_model), scheme)
    loaded = load_bundle(bundle)
    torch.testing.assert_close(loaded(**inputs()).logits, trained(**inputs()).logits, atol=1e-4, rtol=0)
    through = AutoModelForCausalLM.from_pretrained(bundle, config=low_bit_config(bundle), dtype=torch.float32)
    assert torch.equal(through(**inputs()).logits, loaded(**inputs()).logits)
    assert loaded.kv_form == through.kv_form == KV_FORMS[scheme.kv_cache]
    with full_precision_activations(loaded):
        weights_only = apply_scheme(load_model(tiny_model), scheme.weights_only())
        torch.testing.assert_close(loaded(**inputs()).logits, weights_only(**inputs()).logits, atol=1e-4, rtol=0)


@torch.no_grad()
def test_low_bit_kernels_read_the_same_cache_or_say_why_there_are_none(bundle: Path) -> None:
    scheme = read_scheme(bundle)
    if scheme.rotates:
        with pytest.raises(ValueError, match="turns what enters down_proj, which no low-bit kernel does"):
            require_kernels(bundle)
        return
    deployed = load_deployed(bundle, torch.bfloat16 if scheme.activation_bits == 16 else torch.float32)
    assert deployed.kv_form == KV_FORMS[scheme.kv_cache]
    expected, got = load_bundle(bundle)(**inputs()).logits, deployed(**inputs()).logits.float()
    assert (got - expected).abs().mean() < 0.05 * expected.abs().mean()
    deployed.kv_form = None
    assert not torch.equal(deployed(**inputs()).logits.float(), got)


def test_a_turned_bundle_names_its_quantiser_so_that_no_other_runtime_computes_something_else(bundle: Path) -> None:
    said = json.loads((bundle / "config.json").read_text())
    if read_scheme(bundle).rotates:
        assert "quant_method" not in said["quantization_config"]
        assert said["tie_word_embeddings"] is False
    else:
        assert said["quantization_config"]["quant_method"] == "compressed-tensors"
