"""A rotated model against the model it was made from: equal before quantisation, and with tamer activations."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from reflux.components.algorithms.hadamard import (
    block_size,
    in_common_basis,
    residual_signs,
    rotate,
    turn_down_inputs,
    turned,
    turned_back,
    walsh_hadamard,
)
from reflux.components.algorithms.low_bit import Scheme, apply_scheme, watching_sites

NORMS = 1e-5
"""Apart by so much: transformers computes norms in float32 whatever the model's type."""
ROTATED = Scheme(weight_bits=16, activation_bits=16, rotation="hadamard")


def inputs() -> dict[str, torch.Tensor]:
    input_BT = torch.randint(3, 259, (2, 40), generator=torch.Generator().manual_seed(1))
    return {"input_ids": input_BT, "position_ids": torch.arange(40).expand(2, 40)}


@pytest.fixture
def full(tiny_model: Path) -> Any:
    """In float64, with norms whose weights differ: of ones, folding them would not show."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.copy_(torch.rand(p.shape, generator=generator) * 2 + 0.1)
    return model


def sylvester(size: int) -> np.ndarray:
    """Another construction of the same matrix: the sign of entry (i, j) is that of the common bits of i and j."""
    return np.array([[(-1) ** bin(i & j).count("1") for j in range(size)] for i in range(size)]) / np.sqrt(size)


@pytest.mark.parametrize(("width", "block"), [(64, 64), (576, 64), (1536, 512), (6, 2), (7, 1)])
def test_the_transform_is_the_matrix_in_blocks(width: int, block: int) -> None:
    assert block_size(width) == block
    x_ND = torch.randn(3, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected_ND = x_ND.numpy() @ np.kron(np.eye(width // block), sylvester(block))
    np.testing.assert_allclose(walsh_hadamard(x_ND).numpy(), expected_ND, atol=1e-12)
    torch.testing.assert_close(turned_back(turned(x_ND)), x_ND, atol=1e-12, rtol=0)
    assert set(residual_signs(width).tolist()) <= {1, -1}


def test_one_large_channel_is_spread_over_its_block() -> None:
    x_D = torch.zeros(576)
    x_D[100] = 8.0
    assert (walsh_hadamard(x_D).abs()[64:128] - 1).abs().max() < 1e-6
    assert walsh_hadamard(x_D).count_nonzero() == 64


@torch.no_grad()
def test_a_rotated_model_computes_the_same(full: Any, tiny_model: Path) -> None:
    expected = full(**inputs()).logits
    turned_model = apply_scheme(copy.deepcopy(full), ROTATED)
    torch.testing.assert_close(turned_model(**inputs()).logits, expected, atol=NORMS, rtol=0)
    assert not torch.allclose(turned_model.model.layers[0].mlp.up_proj.weight, full.model.layers[0].mlp.up_proj.weight)
    single = full.float()
    turned_model = apply_scheme(copy.deepcopy(single), ROTATED)
    torch.testing.assert_close(turned_model(**inputs()).logits, single(**inputs()).logits, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_a_tied_head_is_untied(full: Any) -> None:
    assert full.lm_head.weight is full.model.embed_tokens.weight
    model = apply_scheme(full, ROTATED)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert model.config.tie_word_embeddings is False
    assert all(bool((p == 1).all()) for name, p in model.named_parameters() if "norm" in name)


@torch.no_grad()
def test_biases_are_turned_too() -> None:
    config = Qwen2Config(
        vocab_size=64, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).double().eval()
    for p in model.parameters():
        p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.1)
    assert model.model.layers[0].self_attn.v_proj.bias is not None
    input_BT = torch.arange(3, 23)[None]
    expected = model(input_BT).logits
    torch.testing.assert_close(apply_scheme(model, ROTATED)(input_BT).logits, expected, atol=NORMS, rtol=0)


@torch.no_grad()
def test_layers_can_be_compared_in_a_common_basis(full: Any) -> None:
    model = apply_scheme(copy.deepcopy(full), ROTATED)
    outputs: dict[Any, torch.Tensor] = {}
    for one in (full, model):
        one.model.layers[0].register_forward_hook(
            lambda module, args, output, one=one: outputs.update({one: in_common_basis(one, output)})
        )
        one(**inputs())
    torch.testing.assert_close(outputs[model], outputs[full], atol=NORMS, rtol=0)


@torch.no_grad()
def test_a_deployed_model_is_not_turned_again(full: Any) -> None:
    model = apply_scheme(copy.deepcopy(full), ROTATED)
    again = copy.deepcopy(full)
    rotate(again)
    apply_scheme(again, ROTATED, on_the_grid=True)
    assert torch.equal(again(**inputs()).logits, model(**inputs()).logits)


@torch.no_grad()
def test_an_outlier_channel_costs_less_once_it_is_spread(full: Any) -> None:
    """One channel of the residual stream forty times larger than the others, as trained models have it."""
    full.model.embed_tokens.weight[:, 5] *= 40
    full.lm_head.weight = torch.nn.Parameter(full.lm_head.weight.detach().clone())
    full.lm_head.weight[:, 5] /= 40
    full.config.tie_word_embeddings = False
    expected = full(**inputs()).logits.log_softmax(-1)

    def divergence(**options: Any) -> float:
        scheme = Scheme(weight_bits=16, activation_bits=4, activation="plain", **options)
        got = apply_scheme(copy.deepcopy(full), scheme)(**inputs()).logits.log_softmax(-1)
        return float((expected.exp() * (expected - got)).sum(-1).mean())

    assert divergence(rotation="hadamard") < 0.5 * divergence()


@torch.no_grad()
def test_what_is_rounded_before_down_proj_is_turned(full: Any) -> None:
    rotate(full)
    rounded: list[torch.Tensor] = []
    seen: list[torch.Tensor] = []
    turn_down_inputs(full, full.model.layers)
    full.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda module, args: rounded.append(args[0]))
    with watching_sites(full, lambda site, x: seen.append(x) if site == "layers.0.down_in" else None):
        full(**inputs())
    torch.testing.assert_close(rounded[0], walsh_hadamard(seen[0]), atol=0, rtol=0)


def test_what_cannot_be_rotated_is_refused(full: Any) -> None:
    with pytest.raises(ValueError, match="rotation 'fourier': allowed are none, hadamard"):
        Scheme(rotation="fourier")
    with pytest.raises(ValueError, match="rotation 'hadamard': activation 'dual' takes its scales from a table"):
        Scheme(rotation="hadamard")
    del full.model.layers[1].mlp.gate_proj
    with pytest.raises(ValueError, match=r"LlamaForCausalLM: has no mlp\.gate_proj, reflux cannot rotate it"):
        rotate(full)


@torch.no_grad()
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight"])
def test_weights_that_are_not_finite_are_named_before_anything_changes(full: Any, name: str) -> None:
    full.get_parameter(name)[5] = torch.nan
    before = copy.deepcopy(full.state_dict())
    with pytest.raises(ValueError, match=f"{name}: is not finite everywhere"):
        rotate(full)
    assert all(torch.equal(value.nan_to_num(), before[at].nan_to_num()) for at, value in full.state_dict().items())


@torch.no_grad()
def test_a_model_that_would_compute_something_else_is_refused(full: Any) -> None:
    class Offset(torch.nn.Module):
        def __init__(self, norm: Any) -> None:
            super().__init__()
            self.weight, self.norm = norm.weight, norm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x) + 0.5  # knows of channels, so it does not commute with a rotation

    full.model.layers[0].input_layernorm = Offset(full.model.layers[0].input_layernorm)
    with pytest.raises(ValueError, match="does not know how to rotate it"):
        rotate(full)


def test_other_decoders_are_refused() -> None:
    other = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16, bos_token_id=1, eos_token_id=2))
    with pytest.raises(ValueError, match="GPT2LMHeadModel: reflux quantises decoders"):
        apply_scheme(other, ROTATED)
