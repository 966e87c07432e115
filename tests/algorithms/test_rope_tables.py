"""Rotary tables of 8 bits, against numpy, and that fewer are refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from reflux.components.algorithms.low_bit import Scheme, apply_scheme, full_precision_activations
from reflux.components.algorithms.rope_tables import round_rope, rounded_table


@pytest.fixture(scope="module")
def full(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64).eval()


def tables(model: Any, tokens: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    return model.model.rotary_emb(torch.zeros(1, dtype=torch.float64), torch.arange(tokens)[None])


def test_sines_and_cosines_lie_on_127_steps_of_one_sign(full: Any) -> None:
    model = apply_scheme(copy.deepcopy(full), Scheme(weight_bits=16, activation_bits=16, rope_bits=8))
    inverse = 1.0 / model.config.rope_parameters["rope_theta"] ** (np.arange(0, 16, 2) / 16)
    angle_TD = np.concatenate([np.arange(300)[:, None] * inverse] * 2, -1)
    for table, exact_TD in zip(tables(model), (np.cos(angle_TD), np.sin(angle_TD)), strict=True):
        np.testing.assert_allclose(table[0].numpy() * 127, np.round(table[0].numpy() * 127), atol=1e-9)
        # the model's own angles are float32: their sines are off by up to 1e-5
        np.testing.assert_allclose(table[0].numpy(), exact_TD, atol=0.5 / 127 + 2e-5)


def test_a_scaled_table_has_a_scaled_grid() -> None:
    table = torch.linspace(-1.4, 1.4, 1001)
    assert torch.allclose(rounded_table(table, 8, 1.4), (table / 1.4 * 127).round() * 1.4 / 127)
    assert rounded_table(table.to(torch.bfloat16), 8, 1.4).dtype == torch.bfloat16


@torch.no_grad()
def test_the_forward_changes_a_little_and_back(full: Any) -> None:
    inputs = {"input_ids": torch.arange(3, 203)[None], "position_ids": torch.arange(200)[None]}
    expected = full(**inputs).logits
    model = apply_scheme(copy.deepcopy(full), Scheme(weight_bits=16, activation_bits=16, rope_bits=8))
    change = (model(**inputs).logits - expected).abs().mean() / expected.abs().mean()
    assert 1e-6 < change < 0.01
    with full_precision_activations(model):
        assert torch.equal(model(**inputs).logits, expected)


@pytest.mark.parametrize("bits", [4, 2, 7, 32])
def test_other_bits_are_refused_with_the_reason(bits: int) -> None:
    with pytest.raises(ValueError, match=f"rope_bits {bits}: allowed are 8, or 16.*perplexity"):
        Scheme(rope_bits=bits)


def test_a_model_without_such_tables_is_refused() -> None:
    bare = nn.Module()
    bare.model = nn.Module()
    with pytest.raises(ValueError, match="rope_bits 8: Module has no rotary embedding"):
        round_rope(bare, 8)
