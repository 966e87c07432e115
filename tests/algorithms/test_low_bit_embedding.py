"""The grid of an 8-bit embedding by hand, what stays tied, and codes in the place of weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GemmaConfig, GemmaForCausalLM

from reflux.components.algorithms.coded_tables import CodedEmbedding, CodedHead, use_coded_tables
from reflux.components.algorithms.cpu_kernels import CodedWeight
from reflux.components.algorithms.low_bit import Scheme, apply_scheme, require_fitting
from reflux.components.algorithms.low_bit_embedding import table_codes, tables
from reflux.components.algorithms.quantizers import weight_values
from reflux.components.evaluate.footprint import held_bytes
from reflux.components.models import load_model

ALONE = Scheme(weight_bits=16, activation_bits=16, embedding_bits=8)
HEAD, EMBEDDING = "lm_head", "model.embed_tokens"


@pytest.fixture
def model(tiny_model: Path) -> Any:
    return load_model(tiny_model)


def untied(model: Any) -> Any:
    model = copy.deepcopy(model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 2 + 0.01, requires_grad=False)
    model.config.tie_word_embeddings = False
    return model


def test_each_rows_largest_weight_lies_on_code_127() -> None:
    codes_VD, scale_V1 = table_codes(torch.tensor([[0.5, -1.27, 0.004, 0.0], [0.0] * 4]))
    assert codes_VD.tolist() == [[50, -127, 0, 0], [0] * 4]
    assert scale_V1[0].item() == torch.tensor(0.01).half().item()


def test_a_rounded_table_gives_its_codes_back() -> None:
    weight_VD = torch.randn(500, 48, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 500)[:, None]
    codes_VD, scale_V1 = table_codes(weight_VD)
    rounded_VD = weight_values(codes_VD, scale_V1)
    assert all(torch.equal(a, b) for a, b in zip(table_codes(rounded_VD), (codes_VD, scale_V1), strict=True))
    assert ((rounded_VD - weight_VD).abs() <= scale_V1 * 0.57).all()  # half a step, and what float16 takes of the last


def test_a_tied_head_has_the_embeddings_rounded_weight(model: Any) -> None:
    before_VD = model.lm_head.weight.detach().clone()
    apply_scheme(model, ALONE)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert list(tables(model)) == [EMBEDDING]
    assert torch.equal(model.lm_head.weight, weight_values(*table_codes(before_VD)))
    assert not torch.equal(model.lm_head.weight, before_VD)


def test_a_head_of_its_own_is_rounded_by_itself(model: Any) -> None:
    own = untied(model)
    expected = {name: weight_values(*table_codes(table.weight.detach().clone())) for name, table in tables(own).items()}
    assert list(expected) == [EMBEDDING, HEAD]
    apply_scheme(own, ALONE)
    for name, weight_VD in expected.items():
        assert torch.equal(own.get_submodule(name).weight, weight_VD)


@torch.no_grad()
@pytest.mark.parametrize("is_tied", [True, False])
def test_codes_compute_what_the_rounded_weights_do(model: Any, is_tied: bool) -> None:
    model = apply_scheme(model if is_tied else untied(model), ALONE)
    inputs = {"input_ids": torch.arange(3, 43)[None], "position_ids": torch.arange(40)[None]}
    expected, was_held = model(**inputs).logits, held_bytes(model)
    coded = {
        name: CodedWeight(bits=8, codes_OI=codes, scale_OG=scale)
        for name, (codes, scale) in ((name, table_codes(table.weight)) for name, table in tables(model).items())
    }
    use_coded_tables(model, coded, torch.float32)
    torch.testing.assert_close(model(**inputs).logits, expected, atol=2e-6, rtol=0)
    assert isinstance(model.get_output_embeddings(), CodedHead)
    rows, channels = next(iter(coded.values())).codes_OI.shape
    assert was_held - held_bytes(model) == len(coded) * rows * (4 * channels - channels - 4)


@pytest.mark.parametrize("bits", [4, 2, 7, 32, 8.0])
def test_other_bits_are_refused(bits: Any) -> None:
    with pytest.raises(ValueError, match=f"embedding_bits {bits}: allowed are 8, or 16"):
        Scheme(embedding_bits=bits)


@pytest.mark.parametrize("scheme", [ALONE, Scheme(activation="plain", rotation="hadamard", embedding_bits=8)])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf, 1e8])
def test_what_no_grid_holds_is_named_and_the_model_left_alone(model: Any, scheme: Scheme, value: float) -> None:
    own = untied(model)
    before_VD = own.model.embed_tokens.weight.detach().clone()
    own.lm_head.weight[5, 3] = value
    with pytest.raises(
        ValueError, match=r"lm_head: row 5 has weights up to .*; a scale is a float16, so a row of 8 bits"
    ):
        apply_scheme(own, scheme)
    assert torch.equal(own.model.embed_tokens.weight, before_VD)
    assert own.lm_head.weight[5, 3].item() == pytest.approx(value, nan_ok=True)


def test_a_head_with_a_bias_is_refused_before_anything_turns(model: Any) -> None:
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="embedding_bits 8: the output head of LlamaForCausalLM has a bias"):
        apply_scheme(model, Scheme(activation="plain", rotation="hadamard", embedding_bits=8))
    assert model.config.tie_word_embeddings is True


def test_an_embedding_that_scales_what_it_looks_up_is_refused_without_weights() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 50, "head_dim": 8}
    with torch.device("meta"):
        gemma = GemmaForCausalLM(GemmaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    require_fitting(gemma, Scheme(group_size=32))
    with pytest.raises(ValueError, match=r"GemmaForCausalLM changes what it looks up \(GemmaTextScaledWordEmbedding\)"):
        require_fitting(gemma, Scheme(group_size=32, embedding_bits=8))


def coded(weight_VD: torch.Tensor) -> CodedWeight:
    codes_VD, scale_V1 = table_codes(weight_VD)
    return CodedWeight(bits=8, codes_OI=codes_VD, scale_OG=scale_V1)


@pytest.mark.parametrize("width", [64, 72, 100])
@pytest.mark.parametrize("rows", [1, 40])
def test_bfloat16_of_any_width(width: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(width)
    weight = coded(torch.randn(300, width, generator=generator))
    hidden = torch.randn(rows, width, generator=generator).to(torch.bfloat16)
    expected = hidden.float() @ weight_values(weight.codes_OI, weight.scale_OG).t()
    got = CodedHead(weight, torch.bfloat16)(hidden)
    assert got.dtype == torch.bfloat16
    assert (got.float() - expected).norm() / expected.norm() < 4e-3


@pytest.mark.parametrize("token", [-1, 300])
def test_a_token_outside_the_vocabulary_is_no_row(token: int) -> None:
    with pytest.raises(IndexError):
        CodedEmbedding(coded(torch.ones(300, 8)), torch.float32)(torch.tensor([token]))
