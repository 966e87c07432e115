"""Weights with zero points: golden values in numpy, gradients, and what such a grid can and cannot hold.

Shapes: O outputs, I inputs, G groups of a row, S inputs of a group.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from reflux.components.algorithms.layer_bits import TERNARY
from reflux.components.algorithms.low_bit import LowBitLinear, Scheme, apply_scheme
from reflux.components.algorithms.quantizers import (
    SMALLEST_SCALE,
    fake_quantize_weight,
    require_grid,
    weight_codes,
    weight_values,
    zero_points,
)
from reflux.components.models import load_model

BITS = pytest.mark.parametrize("bits", [2, 3, 4, 8])


def weights(rows: int, columns: int, seed: int = 0, offset: float = 0.4) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) + offset


@BITS
@pytest.mark.parametrize(("columns", "group"), [(64, 64), (96, 32), (15, 5), (6, 1)])
def test_codes_scales_and_zero_points_are_those_of_numpy(bits: int, columns: int, group: int) -> None:
    weight_OI = weights(7, columns)
    zero_OG = zero_points(weight_OI, bits, group)
    codes_OI, scale_OG = weight_codes(weight_OI, bits, group, zero_OG=zero_OG)

    grouped_OGS = weight_OI.numpy().reshape(7, -1, group)
    low_OG, high_OG = np.minimum(grouped_OGS.min(-1), 0), np.maximum(grouped_OGS.max(-1), 0)
    step_OG = (high_OG - low_OG) / np.float32(2**bits - 1)
    expected_zero_OG = -(2 ** (bits - 1)) - np.rint(low_OG / step_OG)
    expected_scale_OG = step_OG.astype(np.float16).astype(np.float32)
    position_OGS = np.rint(grouped_OGS / expected_scale_OG[..., None]) + expected_zero_OG[..., None]
    expected_OGS = np.clip(position_OGS, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)

    assert (zero_OG.dtype, codes_OI.dtype) == (torch.int8, torch.int8)
    np.testing.assert_array_equal(zero_OG.numpy(), expected_zero_OG)
    np.testing.assert_array_equal(scale_OG.numpy(), expected_scale_OG)
    np.testing.assert_array_equal(codes_OI.numpy().reshape(7, -1, group), expected_OGS)
    expected_values_OGS = (expected_OGS - expected_zero_OG[..., None]).astype(np.float32) * expected_scale_OG[..., None]
    values_OI = fake_quantize_weight(weight_OI, bits, group, zero_OG=zero_OG)
    np.testing.assert_array_equal(values_OI.numpy().reshape(7, -1, group), expected_values_OGS)
    assert torch.equal(values_OI, weight_values(codes_OI, scale_OG, zero_OG))  # imitated and stored, to the bit


@BITS
def test_no_weight_is_off_by_more_than_half_a_step(bits: int) -> None:
    weight_OI = weights(64, 128, seed=1)
    zero_OG = zero_points(weight_OI, bits, 32)
    values_OI = fake_quantize_weight(weight_OI, bits, 32, zero_OG=zero_OG)
    _, scale_OG = weight_codes(weight_OI, bits, 32, zero_OG=zero_OG)
    error_OGS = (values_OI - weight_OI).reshape(64, 4, 32).abs()
    assert (error_OGS <= scale_OG[..., None] * (0.5 + 2**bits * 2**-11)).all()  # half a step, and float16's rounding


@BITS
def test_what_lies_on_such_a_grid_comes_back_to_the_bit(bits: int) -> None:
    """Groups that use both ends of their codes, with scales of float16 and zero points among the codes."""
    generator = torch.Generator().manual_seed(2)
    lowest = -(2 ** (bits - 1))
    codes_OI = torch.randint(lowest, -lowest, (6, 48), generator=generator, dtype=torch.int8)
    codes_OI[:, ::16], codes_OI[:, 1::16] = lowest, -lowest - 1
    scale_OG = (torch.rand(6, 3, generator=generator) + 0.5).half().float()
    zero_OG = torch.randint(lowest, -lowest, (6, 3), generator=generator, dtype=torch.int8)
    on_grid_OI = weight_values(codes_OI, scale_OG, zero_OG)
    assert torch.equal(zero_points(on_grid_OI, bits, 16), zero_OG)
    again_OI, same_OG = weight_codes(on_grid_OI, bits, 16, zero_OG=zero_OG)
    assert torch.equal(same_OG, scale_OG)
    assert torch.equal(again_OI, codes_OI)


def test_an_offset_between_two_steps_is_not_reproduced() -> None:
    """GGUF's Q4_1 is w = d q + m with any m: a zero point that is a code keeps zeros, and misses m by up to d / 2."""
    generator = torch.Generator().manual_seed(3)
    steps_OI = torch.randint(0, 16, (16, 32), generator=generator).float()
    steps_OI[:, :2] = torch.tensor([0.0, 15.0])
    offset_O1 = -7 - torch.rand(16, 1, generator=generator)
    weight_OI = (steps_OI + offset_O1) * 0.125
    rounded_OI = fake_quantize_weight(weight_OI, 4, 32, zero_OG=zero_points(weight_OI, 4, 32))
    miss_O1 = (offset_O1 - offset_O1.round()).abs() * 0.125
    inside_OI = (steps_OI > 0) & (steps_OI < 15)
    torch.testing.assert_close(
        (rounded_OI - weight_OI).abs()[inside_OI], miss_O1.expand_as(weight_OI)[inside_OI], rtol=0, atol=1e-5
    )
    assert miss_O1.max() > 0.05


@BITS
def test_a_grid_that_follows_skewed_weights_is_finer(bits: int) -> None:
    weight_OI = weights(64, 64, seed=4).abs() * 2
    asymmetric_OI = fake_quantize_weight(weight_OI, bits, 32, zero_OG=zero_points(weight_OI, bits, 32))
    symmetric_OI = fake_quantize_weight(weight_OI, bits, 32)
    assert (asymmetric_OI - weight_OI).pow(2).sum() < 0.4 * (symmetric_OI - weight_OI).pow(2).sum()


@BITS
def test_ends_of_the_range(bits: int) -> None:
    """All positive, all negative, one value, and none: zero is a code, and a group of zeros stays one."""
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    weight_OI = torch.zeros(4, 8)
    weight_OI[0], weight_OI[1] = torch.linspace(1, 2, 8), torch.linspace(-2, -1, 8)
    weight_OI[2] = -0.25
    zero_OG = zero_points(weight_OI, bits, 8)
    assert zero_OG[:, 0].tolist() == [lowest, highest, highest, lowest]
    codes_OI, scale_OG = weight_codes(weight_OI, bits, 8, zero_OG=zero_OG)
    assert scale_OG[3, 0] == SMALLEST_SCALE
    values_OI = weight_values(codes_OI, scale_OG, zero_OG)
    assert (values_OI[3] == 0).all()
    torch.testing.assert_close(values_OI[2], weight_OI[2], rtol=1e-3, atol=0)


@BITS
def test_clipping_moves_both_ends_alike_and_no_zero_point(bits: int) -> None:
    weight_OI = weights(8, 64)
    zero_OG, half_OG = zero_points(weight_OI, bits, 16), torch.full((8, 4), 0.5).log()
    _, whole_OG = weight_codes(weight_OI, bits, 16, zero_OG=zero_OG)
    codes_OI, clipped_OG = weight_codes(weight_OI, bits, 16, half_OG, zero_OG)
    torch.testing.assert_close(clipped_OG, whole_OG / 2, rtol=2**-10, atol=0)
    assert codes_OI.min() == -(2 ** (bits - 1))
    assert codes_OI.max() == 2 ** (bits - 1) - 1


@BITS
def test_the_gradient_of_the_clipping_is_that_of_a_learned_step_size(bits: int) -> None:
    """Reference: clip between the shifted ends, round straight through, and let autograd do the rest."""
    weight_OI, upstream_OI = weights(6, 32).requires_grad_(), weights(6, 32, seed=3)
    log_clip_OG = (weights(6, 2, seed=4, offset=0) / 4 - 0.2).requires_grad_()
    zero_OG = zero_points(weight_OI.detach(), bits, 16)
    fake_quantize_weight(weight_OI, bits, 16, log_clip_OG, zero_OG).backward(upstream_OI)
    assert torch.equal(weight_OI.grad, upstream_OI)

    reference_OG = log_clip_OG.detach().clone().requires_grad_()
    grouped_OGS = weight_OI.detach().reshape(6, 2, 16)
    width_OG = grouped_OGS.amax(-1).clamp(min=0) - grouped_OGS.amin(-1).clamp(max=0)
    exact_OG = width_OG * reference_OG.exp() / (2**bits - 1)
    scale_OG = exact_OG + (exact_OG.half().float() - exact_OG).detach()
    lowest_OG1 = (-(2 ** (bits - 1)) - zero_OG.float())[..., None]
    steps_OGS = (grouped_OGS / scale_OG[..., None]).clamp(lowest_OG1, lowest_OG1 + 2**bits - 1)
    values_OGS = (steps_OGS + (steps_OGS.round() - steps_OGS).detach()) * scale_OG[..., None]
    values_OGS.backward(upstream_OI.view_as(values_OGS))
    torch.testing.assert_close(log_clip_OG.grad, reference_OG.grad, rtol=2e-3, atol=1e-3)
    assert log_clip_OG.grad.abs().max() > 0


@pytest.mark.parametrize("has_zero_points", [False, True])
def test_weights_that_no_scale_reaches_are_refused_by_layer(has_zero_points: bool) -> None:
    """A float16 ends at 65504: 15 of those are 982,560, from one end of a 4-bit grid to the other."""
    for bad in (torch.nan, torch.inf, -torch.inf):
        weight_OI = weights(2, 8)
        weight_OI[1, 3] = bad
        with pytest.raises(ValueError, match="up_proj: has weights that are not finite, which no grid holds"):
            require_grid(weight_OI, 4, 4, "up_proj", has_zero_points)
    weight_OI = torch.zeros(2, 8)
    weight_OI[1, 3], weight_OI[1, 2] = 5e5, -4e5
    if has_zero_points:
        require_grid(weight_OI, 4, 4, "up_proj", True)  # 9e5 wide
        weight_OI[1, 2] = -5e5
    message = r"up_proj: has weights up to 5e\+05; a scale is a float16, so a grid of 4 bits is at most 9\.83e\+05 wide"
    with pytest.raises(ValueError, match=message):
        require_grid(weight_OI, 4, 4, "up_proj", has_zero_points)
    require_grid(weight_OI, 8, 4, "up_proj", has_zero_points)


@torch.no_grad()
def test_every_layer_of_a_model_gets_them_but_ternary_ones(tiny_model: Path) -> None:
    model, by_hand = load_model(tiny_model), load_model(tiny_model)
    for name, module in by_hand.model.layers.named_modules():
        if isinstance(module, nn.Linear):
            bits = TERNARY if name.endswith("q_proj") else 4
            zero_OG = None if bits == TERNARY else zero_points(module.weight, bits, 32)
            codes_OI, scale_OG = weight_codes(module.weight, bits, 32, zero_OG=zero_OG)
            module.weight.copy_(weight_values(codes_OI, scale_OG, zero_OG))
    scheme = Scheme(group_size=32, activation_bits=16, exceptions=("q_proj=ternary",), zero_points=True)
    apply_scheme(model, scheme)
    low_bit: dict[str, Any] = {name: m for name, m in model.named_modules() if isinstance(m, LowBitLinear)}
    assert {name.rpartition(".")[2] for name, m in low_bit.items() if not m.has_zero_points} == {"q_proj"}
    inputs = {"input_ids": torch.arange(3, 15)[None], "position_ids": torch.arange(12)[None]}
    assert torch.equal(model(**inputs).logits, by_hand(**inputs).logits)


def test_a_scheme_with_zero_points_is_another_scheme() -> None:
    assert Scheme(zero_points=True).digest() != Scheme().digest()
    assert "zero_points" not in Scheme().as_json()
    assert Scheme.from_json(Scheme(zero_points=True).as_json()) == Scheme(zero_points=True)
    assert Scheme(zero_points=True).weights_only().zero_points


def test_a_scheme_of_another_version_is_refused_by_its_field() -> None:
    with pytest.raises(ValueError, match="scheme: 'codebook' is not known here, another version of reflux wrote it"):
        Scheme.from_json(Scheme().as_json() | {"codebook": "vector"})
