"""Packed weights against the layers that they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from reflux.components.algorithms.low_bit import Scheme, apply_scheme, frozen_weights
from reflux.components.algorithms.packed_linears import packed_linears
from reflux.components.models import load_model


def logits(model: Any, rows: int) -> torch.Tensor:
    input_BT = torch.arange(3 * rows).reshape(rows, 3) % 250
    with torch.no_grad():
        return model(input_ids=input_BT, position_ids=torch.arange(3).expand(rows, 3)).logits


@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("rows", [1, 8, 40])
def test_packed_linears_compute_what_they_did(tiny_model: Path, bits: int, rows: int) -> None:
    scheme = Scheme(weight_bits=bits, group_size=16, activation_bits=16, activation="plain")
    model = apply_scheme(load_model(tiny_model), scheme)
    with frozen_weights(model):
        expected = logits(model, rows)
    with packed_linears(model):
        torch.testing.assert_close(logits(model, rows), expected, atol=1e-5, rtol=1e-5)
        assert not logits(model, rows).requires_grad


def test_weights_are_the_same_to_the_bit_after_the_block_and_after_an_error(tiny_model: Path) -> None:
    model = load_model(tiny_model)
    before = {name: p.clone() for name, p in model.named_parameters()}
    held = dict(model.named_parameters())
    with packed_linears(model):
        assert sum(p.numel() for p in model.model.layers.parameters()) < 0.01 * sum(
            p.numel() for name, p in before.items() if name.startswith("model.layers.")
        )  # held once, not twice
    with pytest.raises(KeyError), packed_linears(model):
        raise KeyError
    after = dict(model.named_parameters())
    assert all(after[name] is held[name] and torch.equal(after[name], before[name]) for name in before)


def test_after_the_block_weights_count_and_learn_again(tiny_model: Path) -> None:
    model = load_model(tiny_model).requires_grad_(True)
    with packed_linears(model):
        pass
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_a_bfloat16_model_keeps_its_own_product(tiny_model: Path) -> None:
    model = load_model(tiny_model, "bfloat16")
    expected = logits(model, 2)
    with packed_linears(model):
        assert torch.equal(logits(model, 2), expected)
