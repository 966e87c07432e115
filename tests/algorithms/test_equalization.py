"""Equalised models compute the same, with the scales of the formula, and round with less noise."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from reflux.components.algorithms.equalization import FIRST_POSITION, ChannelPower, equalize, equalizing_scales
from reflux.components.algorithms.low_bit import Scheme, apply_scheme, watching_sites

TOKENS = 40


def inputs() -> dict[str, torch.Tensor]:
    input_BT = torch.randint(3, 259, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    return {"input_ids": input_BT, "position_ids": torch.arange(TOKENS).expand(2, TOKENS)}


@pytest.fixture
def full(tiny_model: Path) -> Any:
    """In float64, with a few channels of the norms and of the MLP far larger than the rest, as trained models have."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight[::9] = 6.0
            layer.mlp.up_proj.weight[::13] *= 8
    return model


@torch.no_grad()
def seen(model: Any, mask_BT: torch.Tensor | None = None) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Root mean squares of channels as they were counted, and all that passed."""
    power, passed = ChannelPower(), {}
    with watching_sites(model, lambda site, x_BTC: (power.see(site, x_BTC), passed.update({site: x_BTC.clone()}))):
        power.begin(torch.ones(2, TOKENS, dtype=torch.int64) if mask_BT is None else mask_BT)
        model(**inputs())
    return power.rms(), passed


def equalized(model: Any, power: float = 0.5) -> Any:
    other = copy.deepcopy(model)
    equalize(other, equalizing_scales(other, seen(other)[0], power))
    return other


def test_channels_are_counted_over_valid_tokens_behind_the_first(full: Any) -> None:
    mask_BT = torch.ones(2, TOKENS, dtype=torch.int64)
    mask_BT[1, 25:] = 0
    rms, passed = seen(full, mask_BT)
    for site, x_BTC in passed.items():
        counted_NC = np.concatenate([x_BTC[0, FIRST_POSITION:].numpy(), x_BTC[1, FIRST_POSITION:25].numpy()])
        np.testing.assert_allclose(rms[site], np.sqrt((counted_NC**2).mean(0)), rtol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("power", [0.25, 0.5, 1.0])
def test_what_a_model_computes_is_the_same(full: Any, power: float) -> None:
    expected = full(**inputs()).logits
    other = equalized(full, power)
    torch.testing.assert_close(other(**inputs()).logits, expected, atol=1e-5, rtol=0)
    for name in ("mlp.up_proj", "mlp.down_proj", "self_attn.v_proj", "self_attn.o_proj", "input_layernorm"):
        first, changed = (m.model.layers[0].get_submodule(name).weight for m in (full, other))
        assert not torch.allclose(first, changed, rtol=0.05)


@torch.no_grad()
def test_the_scales_are_those_of_the_formula(full: Any) -> None:
    rms, _ = seen(full)
    scales = equalizing_scales(full, rms, 0.5)
    mlp = full.model.layers[1].mlp
    sigma_C = rms["layers.1.mlp_in"].numpy()
    norm_C = np.sqrt((np.concatenate([mlp.gate_proj.weight, mlp.up_proj.weight]) ** 2).sum(0))
    bare_C = np.sqrt(sigma_C / norm_C)
    expected_C = bare_C * np.sqrt((sigma_C**2 / bare_C**2).sum() / (sigma_C**2).sum())
    np.testing.assert_allclose(scales["layers.1.mlp_in"], expected_C, rtol=1e-5)
    assert scales["layers.0.o_in"].shape == (32,)  # two heads of values, read by four of queries


@torch.no_grad()
def test_the_noise_falls_to_the_square_of_the_cosine(full: Any) -> None:
    """(sum rms^2 / s^2) (sum s^2 w^2), where no head shares a scale."""
    rms, _ = seen(full)
    scales = equalizing_scales(full, rms, 0.5)
    norm_C = full.model.layers[0].mlp.down_proj.weight.norm(dim=0)
    sigma_C, scale_C = rms["layers.0.down_in"], scales["layers.0.down_in"].double()
    before = sigma_C.square().sum() * norm_C.square().sum()
    after = (sigma_C / scale_C).square().sum() * (scale_C * norm_C).square().sum()
    assert after / before == pytest.approx(float(torch.cosine_similarity(sigma_C, norm_C, dim=0) ** 2), rel=1e-5)
    assert after < 0.8 * before


@torch.no_grad()
def test_with_rounded_activations_it_is_nearer_to_what_it_was(full: Any) -> None:
    scheme = Scheme(weight_bits=16, activation="plain")
    expected = full(**inputs()).logits
    errors = [
        (apply_scheme(model, scheme)(**inputs()).logits - expected).square().mean()
        for model in (copy.deepcopy(full), equalized(full))
    ]
    assert errors[1] < 0.7 * errors[0]


@torch.no_grad()
def test_biases_of_values_are_divided_too() -> None:
    config = Qwen2Config(
        vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.1,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).double().eval()
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            layer.self_attn.get_submodule(name).bias.normal_(std=0.5, generator=torch.Generator().manual_seed(3))
    expected = model(**inputs()).logits
    torch.testing.assert_close(equalized(model)(**inputs()).logits, expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_channel_that_is_never_used_keeps_a_scale(full: Any) -> None:
    full.model.layers[0].input_layernorm.weight[5] = 0.0
    full.model.layers[0].mlp.down_proj.weight[:, 7] = 0.0
    expected = full(**inputs()).logits
    other = equalized(full)
    torch.testing.assert_close(other(**inputs()).logits, expected, atol=1e-5, rtol=0)
    assert all(p.isfinite().all() for p in other.parameters())


def test_what_cannot_be_equalised_is_refused(full: Any) -> None:
    scales = equalizing_scales(full, seen(full)[0], 0.5)
    before = copy.deepcopy(full.state_dict())
    with pytest.raises(ValueError, match="not those of LlamaForCausalLM"):
        equalize(full, {**scales, "layers.0.attn_in": torch.ones(3)})
    with pytest.raises(ValueError, match="not those of LlamaForCausalLM"):
        equalize(full, {site: scale_C for site, scale_C in scales.items() if "layers.1" not in site})
    assert all(torch.equal(value, before[name]) for name, value in full.state_dict().items())
    other = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=264))
    other.model = torch.nn.Module()
    other.model.layers = other.transformer.h
    with pytest.raises(ValueError, match="has no input_layernorm, reflux cannot equalise it"):
        equalize(other, scales)


def test_norms_that_add_one_to_their_weights_are_found_out() -> None:
    """Gemma's: divided, they are not those of the channels."""
    config = GemmaConfig(
        vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, initializer_range=0.1,
    )  # fmt: skip
    model = GemmaForCausalLM(config).eval()
    with pytest.raises(ValueError, match=r"GemmaForCausalLM: computes something else .* how to equalise it"):
        equalized(model)


def test_traces_that_are_too_short_are_refused(full: Any) -> None:
    with pytest.raises(ValueError, match=f"more than {FIRST_POSITION} tokens"):
        seen(full, (torch.arange(TOKENS) < FIRST_POSITION).long().expand(2, TOKENS))
