"""Master weights that begin at given codes: these very codes, and as near to the full-precision weight as can be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from reflux.components.algorithms.code_cells import MARGIN, begin_at_codes
from reflux.components.algorithms.cpu_kernels import CodedWeight
from reflux.components.algorithms.low_bit import LowBitLinear
from reflux.components.algorithms.quantizers import weight_codes, weight_values, zero_points

GROUP_SIZE = 16


def low_bit(bits: int, has_zero_points: bool) -> LowBitLinear:
    linear = nn.Linear(64, 24, bias=False)
    linear.weight = nn.Parameter(torch.randn(24, 64, generator=torch.Generator().manual_seed(1)) + 0.3)
    return LowBitLinear(linear, bits, GROUP_SIZE, has_zero_points)


def others(linear: LowBitLinear, *, has_zero_points: bool, sign: float = 1.0) -> CodedWeight:
    """Codes of the weight with an error, as another method would choose them, on a narrower grid."""
    generator = torch.Generator().manual_seed(2)
    near_OI = linear.weight.detach() + 0.1 * torch.randn(linear.weight.shape, generator=generator)
    zero_OG = zero_points(near_OI, linear.bits, GROUP_SIZE) if has_zero_points else None
    clip_OG = torch.full((24, 4), -0.2)
    codes_OI, scale_OG = weight_codes(sign * near_OI, linear.bits, GROUP_SIZE, clip_OG, zero_OG)
    return CodedWeight(bits=linear.bits, codes_OI=codes_OI, scale_OG=sign * scale_OG, zero_OG=zero_OG)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(
    ("has_zero_points", "own_zero_points", "sign"),
    [(False, False, 1.0), (False, True, 1.0), (True, True, 1.0), (False, True, -1.0)],
)
def test_the_rounded_weight_is_what_the_codes_stand_for(
    bits: int, has_zero_points: bool, own_zero_points: bool, sign: float
) -> None:
    linear = low_bit(bits, own_zero_points)
    coded = others(linear, has_zero_points=has_zero_points, sign=sign)
    before_OI = linear.weight.detach().clone()
    begin_at_codes(linear, coded, near_weight=True)
    values_OI = weight_values(coded.codes_OI, coded.scale_OG, coded.zero_OG)
    torch.testing.assert_close(linear.rounded().detach(), values_OI, rtol=1e-3, atol=0)  # a step of float16
    scale_OI = coded.scale_OG.abs().repeat_interleave(GROUP_SIZE, 1)
    stayed = (linear.weight - before_OI).abs() < 1e-3 * scale_OI
    inside = ((before_OI - values_OI).abs() / scale_OI < 0.5 - 2 * MARGIN) & (values_OI != 0)
    assert stayed[inside].all()
    moved = ~stayed
    assert moved.any()
    assert ((linear.weight - values_OI).abs() / scale_OI)[moved].max() < 0.5  # to the near end of its cell, no further


def test_training_leaves_a_cell_as_it_leaves_one_of_its_own() -> None:
    linear = low_bit(4, has_zero_points=True)
    begin_at_codes(linear, others(linear, has_zero_points=True), near_weight=True)
    began_OI = linear.rounded().detach().clone()
    with torch.no_grad():
        linear.weight[0, 0] += 0.5
    changed = (linear.rounded() != began_OI).nonzero().tolist()
    assert [0, 0] in changed
    assert all(row == 0 and column < GROUP_SIZE for row, column in changed)


def test_without_a_weight_to_be_near_it_begins_at_the_values() -> None:
    linear = low_bit(4, has_zero_points=True)
    coded = others(linear, has_zero_points=True)
    begin_at_codes(linear, coded, near_weight=False)
    values_OI = weight_values(coded.codes_OI, coded.scale_OG, coded.zero_OG)
    torch.testing.assert_close(linear.weight.detach(), values_OI)
    torch.testing.assert_close(linear.rounded().detach(), values_OI, rtol=1e-3, atol=0)


@pytest.mark.parametrize("scale", [0.5, 0.0])
def test_a_group_of_zeros_stays_one(scale: float) -> None:
    linear = low_bit(4, has_zero_points=True)
    nn.init.zeros_(linear.weight)
    coded = CodedWeight(
        bits=4, codes_OI=torch.zeros(24, 64, dtype=torch.int8), scale_OG=torch.full((24, 4), scale), zero_OG=None
    )
    begin_at_codes(linear, coded, near_weight=True)
    assert linear.log_clip_OG.isfinite().all()
    assert not linear.rounded().any()


@pytest.mark.parametrize(("has_zero_points", "sign"), [(True, 1.0), (False, -1.0)])
def test_what_a_symmetric_grid_cannot_say_is_refused(has_zero_points: bool, sign: float) -> None:
    linear = low_bit(4, has_zero_points=False)
    with pytest.raises(ValueError, match=r"take distill\.weight_zero_points=true"):
        begin_at_codes(linear, others(linear, has_zero_points=has_zero_points, sign=sign), near_weight=True)
