"""The count of bits against sums written out by hand, on the tiny model: hidden 64, intermediate 128, two layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reflux.components.algorithms.effective_bits import (
    UNQUANTISED,
    activation_cost,
    cost_of_activations,
    cost_of_weights,
    weight_cost,
)
from reflux.components.algorithms.layer_bits import TERNARY
from reflux.components.algorithms.low_bit import Scheme
from reflux.components.models import skeleton

ATTENTION = 64 * 64 + 2 * 64 * 32 + 64 * 64
FFN = 3 * 64 * 128


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    return skeleton(tiny_model)


def test_a_value_is_counted_with_its_share_of_scale_and_flag() -> None:
    assert weight_cost(4, 64).total == 4 + 16 / 64
    assert weight_cost(3, 128).total == 3 + 16 / 128
    assert activation_cost("plain", 4, 576).total == pytest.approx(4 + 16 / 576)
    assert activation_cost("dual", 4, 576).total == pytest.approx(4 + 1 + 16 / 576)
    assert weight_cost(TERNARY, 64).total == 2 + 16 / 64
    assert weight_cost(4, 64, has_zero_point=True).total == 4 + (16 + 4) / 64
    assert weight_cost(8, 32, has_zero_point=True).zero_point == 8 / 32
    assert weight_cost(16, 64) == activation_cost("dual", 16, 64) == UNQUANTISED
    assert str(activation_cost("dual", 4, 64)) == "5.25 (code 4.00, flag 1.00, scale 0.25)"


def test_means_are_over_values(model: Any) -> None:
    assert cost_of_weights(model, Scheme()).total == 4.25
    assert cost_of_activations(model, Scheme()).code == 4
    sites = [64, 64, 64, 128]
    assert cost_of_activations(model, Scheme()).scale == pytest.approx(4 * 16 / sum(sites))
    assert cost_of_weights(model, Scheme(weight_bits=16)) == UNQUANTISED
    assert cost_of_activations(model, Scheme(activation_bits=16)) == UNQUANTISED


def test_exceptions_count_by_their_values(model: Any) -> None:
    down = cost_of_weights(model, Scheme(exceptions=("down_proj=8",)))
    assert down.code == pytest.approx((4 * (ATTENTION + FFN) + 4 * 64 * 128) / (ATTENTION + FFN))
    whole_layer = cost_of_weights(model, Scheme(exceptions=("layers.1.*=16",)))
    assert whole_layer.total == pytest.approx((4.25 + 32) / 2)
    half_ternary = cost_of_weights(model, Scheme(exceptions=("layers.*[02468].*_proj=ternary",)))
    assert half_ternary.total == (4.25 + 2.25) / 2
    asymmetric = cost_of_weights(model, Scheme(exceptions=("layers.0.*_proj=ternary",), zero_points=True))
    assert asymmetric.total == (4 + (16 + 4) / 64 + 2.25) / 2  # a ternary grid is symmetric
    inputs = cost_of_activations(model, Scheme(exceptions=("down_in=8",)))
    assert inputs.code == pytest.approx((4 * 3 * 64 + 8 * 128) / (3 * 64 + 128))
    assert inputs.flag == 1


def test_the_table_of_the_docs_is_this_count() -> None:
    text = (Path(__file__).parents[2] / "docs" / "low-bit.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    told = {
        row[0]: [float(cell or 0) for cell in row[1:]]
        for row in rows
        if row[0].startswith(("weight,", "weight of an embedding", "activation,"))
    }
    for name, (code, flag, scale, zero_point, total) in told.items():
        words = name.replace(",", "").split()
        if "embedding" in words:
            counted = weight_cost(8, 576)
        elif words[0] == "weight":
            bits = TERNARY if words[1] == "ternary" else int(words[1])
            counted = weight_cost(bits, int(words[-1]), "zero points" in name)
        else:
            counted = activation_cost(words[3], int(words[1]), int(words[4]))
        shown = (counted.code, counted.flag, round(counted.scale, 3), counted.zero_point, round(counted.total, 4))
        assert shown == (code, flag, scale, zero_point, pytest.approx(total, abs=5e-4)), name
    assert len(told) == 12
