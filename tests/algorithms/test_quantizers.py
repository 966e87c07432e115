"""Rounding of weights and activations: grids, scales, straight-through gradients, and the count of bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reflux.components.algorithms.layer_bits import TERNARY
from reflux.components.algorithms.quantizers import (
    QUANTIZERS,
    SMALLEST_SCALE,
    dual,
    fake_quantize_weight,
    plain,
    weight_codes,
    weight_values,
)

BITS = pytest.mark.parametrize("bits", [2, 3, 4, 8])


def weights(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@BITS
@pytest.mark.parametrize(("columns", "group"), [(64, 64), (96, 32), (15, 5), (6, 1)])
def test_weight_codes_equal_a_literal_loop(bits: int, columns: int, group: int):
    weight_OI = weights(5, columns)
    codes_OI, scale_OG = weight_codes(weight_OI, bits, group)
    assert codes_OI.dtype == torch.int8
    assert scale_OG.shape == (5, columns // group)
    for o in range(5):
        for g in range(columns // group):
            values = weight_OI[o, g * group : (g + 1) * group]
            scale = (max(abs(v) for v in values.tolist()) * 2 / (2**bits - 1)) if len(values) else 0.0
            scale = torch.tensor(scale).half().float().item()
            assert scale_OG[o, g].item() == pytest.approx(scale, rel=1e-3)  # one step of float16
            step = scale_OG[o, g]
            for i, value in enumerate(values):
                code = min(max(round((value / step).item()), -(2 ** (bits - 1))), 2 ** (bits - 1) - 1)
                assert codes_OI[o, g * group + i].item() == code


@BITS
def test_the_whole_range_of_codes_is_used_and_nothing_is_off_by_more_than_half_a_step(bits: int):
    weight_OI = weights(64, 128, seed=1)
    half_range = (2**bits - 1) / 2
    weight_OI[:2, :32] = 0.0
    weight_OI[0, 0], weight_OI[1, 0] = -half_range, half_range  # the largest of their groups: a step of exactly 1
    codes_OI, scale_OG = weight_codes(weight_OI, bits, 32)
    assert codes_OI.min() == -(2 ** (bits - 1)) == codes_OI[0, 0]
    assert codes_OI.max() == 2 ** (bits - 1) - 1 == codes_OI[1, 0]
    error_OGS = (weight_values(codes_OI, scale_OG) - weight_OI).reshape(64, 4, 32).abs()
    assert (error_OGS <= scale_OG[..., None] * (0.5 + 2 ** (bits - 1) * 2**-10)).all()  # and float16's rounding


@BITS
def test_scales_are_float16_values(bits: int):
    _, scale_OG = weight_codes(weights(8, 64), bits, 16)
    assert torch.equal(scale_OG.half().float(), scale_OG)


@BITS
def test_values_that_codes_stand_for_have_those_codes_under_the_same_scale(bits: int):
    generator = torch.Generator().manual_seed(2)
    lowest = -(2 ** (bits - 1))
    codes_OI = torch.randint(lowest, -lowest, (6, 48), generator=generator, dtype=torch.int8)
    scale_OG = torch.rand(6, 3, generator=generator).half().float() + 0.5
    values_OI = weight_values(codes_OI, scale_OG)
    assert torch.equal((values_OI / scale_OG.repeat_interleave(16, 1)).round().to(torch.int8), codes_OI)


def test_rounding_again_moves_deployed_weights():
    """Why a bundle keeps codes and is never rounded twice: the grid's end is 7.5 or 8 steps, not the largest value."""
    once_OI = fake_quantize_weight(weights(16, 64), 4, 16)
    assert not torch.equal(fake_quantize_weight(once_OI, 4, 16), once_OI)


@BITS
@pytest.mark.parametrize("factor", [2.0**-5, 0.25, 1024.0])
def test_codes_do_not_depend_on_the_unit_of_the_weights(bits: int, factor: float):
    codes_OI, scale_OG = weight_codes(weights(8, 64), bits, 32)
    scaled_codes_OI, scaled_scale_OG = weight_codes(weights(8, 64) * factor, bits, 32)
    assert torch.equal(scaled_codes_OI, codes_OI)
    assert torch.equal(scaled_scale_OG, scale_OG * factor)


def test_ternary_codes_equal_a_sum_in_numpy():
    weight_OI = weights(5, 96)
    codes_OI, scale_OG = weight_codes(weight_OI, TERNARY, 32)
    grouped_OGS = weight_OI.numpy().reshape(5, 3, 32)
    mean_OG = np.abs(grouped_OGS).mean(-1).astype(np.float16).astype(np.float32)
    np.testing.assert_allclose(scale_OG.numpy(), mean_OG, rtol=2**-10)
    expected_OGS = (grouped_OGS > scale_OG.numpy()[..., None] / 2).astype(int)
    expected_OGS -= grouped_OGS < -scale_OG.numpy()[..., None] / 2
    assert np.array_equal(codes_OI.numpy().reshape(5, 3, 32), expected_OGS)
    assert codes_OI.unique().tolist() == [-1, 0, 1]
    weight_OI[0, :32] = 0
    assert (fake_quantize_weight(weight_OI, TERNARY, 32)[0, :32] == 0).all()


def test_the_gradient_of_a_ternary_scale_is_that_of_a_learned_step_size():
    weight_OI, upstream_OI = weights(6, 32), weights(6, 32, seed=3)
    log_clip_OG = (weights(6, 2, seed=4) / 4).requires_grad_()
    fake_quantize_weight(weight_OI, TERNARY, 16, log_clip_OG).backward(upstream_OI)

    reference_OG = log_clip_OG.detach().clone().requires_grad_()
    grouped_OGS = weight_OI.reshape(6, 2, 16)
    exact_OG = grouped_OGS.abs().mean(-1) * reference_OG.exp()
    scale_OG = exact_OG + (exact_OG.half().float() - exact_OG).detach()
    steps_OGS = (grouped_OGS / scale_OG[..., None]).clamp(-1, 1)
    values_OGS = (steps_OGS + (steps_OGS.round() - steps_OGS).detach()) * scale_OG[..., None]
    values_OGS.backward(upstream_OI.view_as(values_OGS))
    torch.testing.assert_close(log_clip_OG.grad, reference_OG.grad, rtol=2e-3, atol=1e-3)
    assert log_clip_OG.grad.abs().max() > 0


def test_a_dead_group_stays_zero_with_a_usable_scale():
    weight_OI = weights(2, 8)
    weight_OI[0, :4] = 0
    codes_OI, scale_OG = weight_codes(weight_OI, 4, 4)
    assert scale_OG[0, 0] == SMALLEST_SCALE
    assert (codes_OI[0, :4] == 0).all()
    assert (codes_OI[0, 4:] != 0).any()


def test_a_group_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="group_size 64: must divide the 96"):
        weight_codes(weights(2, 96), 4, 64)


def test_weights_that_are_not_finite_stay_visible():
    for bad in (torch.nan, torch.inf):
        weight_OI = weights(2, 8)
        weight_OI[0, 1] = bad
        values_OI = fake_quantize_weight(weight_OI, 4, 4)
        assert values_OI[0, :4].isnan().any()
        assert values_OI[1].isfinite().all()


def test_the_gradient_passes_a_rounded_weight_unchanged():
    weight_OI = weights(6, 32).requires_grad_()
    upstream_OI = weights(6, 32, seed=3)
    fake_quantize_weight(weight_OI, 4, 16).backward(upstream_OI)
    assert torch.equal(weight_OI.grad, upstream_OI)


@BITS
def test_clipping_moves_the_end_of_the_grid(bits: int):
    weight_OI = weights(8, 64)
    _, whole_OG = weight_codes(weight_OI, bits, 16)
    codes_OI, half_OG = weight_codes(weight_OI, bits, 16, torch.full((8, 4), 0.5).log())
    torch.testing.assert_close(half_OG, whole_OG / 2, rtol=2**-10, atol=0)
    assert (codes_OI == -(2 ** (bits - 1))).any()  # values beyond the end are clipped to it
    untouched = weight_codes(weight_OI, bits, 16, torch.zeros(8, 4))
    assert all(torch.equal(a, b) for a, b in zip(untouched, weight_codes(weight_OI, bits, 16), strict=True))


@BITS
def test_the_gradient_of_the_clipping_is_that_of_a_learned_step_size(bits: int):
    """Reference: clip, then round straight through, and let autograd do the rest."""
    weight_OI, upstream_OI = weights(6, 32), weights(6, 32, seed=3)
    log_clip_OG = (weights(6, 2, seed=4) / 4 - 0.2).requires_grad_()
    fake_quantize_weight(weight_OI, bits, 16, log_clip_OG).backward(upstream_OI)

    reference_OG = log_clip_OG.detach().clone().requires_grad_()
    grouped_OGS, lowest = weight_OI.reshape(6, 2, 16), -(2 ** (bits - 1))
    exact_OG = grouped_OGS.abs().amax(-1) * reference_OG.exp() * 2 / (2**bits - 1)
    scale_OG = exact_OG + (exact_OG.half().float() - exact_OG).detach()
    steps_OGS = (grouped_OGS / scale_OG[..., None]).clamp(lowest, -lowest - 1)
    values_OGS = (steps_OGS + (steps_OGS.round() - steps_OGS).detach()) * scale_OG[..., None]
    values_OGS.backward(upstream_OI.view_as(values_OGS))
    torch.testing.assert_close(log_clip_OG.grad, reference_OG.grad, rtol=2e-3, atol=1e-3)
    assert log_clip_OG.grad.abs().max() > 0


@BITS
def test_plain_equals_a_literal_loop(bits: int):
    x_ND = weights(7, 19, seed=4)
    top = 2 ** (bits - 1) - 1
    rounded_ND = plain(x_ND, None, bits)
    for n in range(7):
        scale = x_ND[n].abs().max().item() / top
        for d in range(19):
            nearest = min(range(-top, top + 1), key=lambda code: abs(code * scale - x_ND[n, d].item()))
            assert rounded_ND[n, d].item() == pytest.approx(nearest * scale, abs=1e-5)


@pytest.mark.parametrize("name", sorted(QUANTIZERS))
def test_activations_keep_shape_type_zeros_and_gradient(name: str):
    x_BTD = weights(6, 10, seed=5).reshape(2, 3, 10)
    x_BTD[1, 1] = 0
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = x_BTD.detach().to(dtype, copy=True).requires_grad_()
        rounded = QUANTIZERS[name](x, torch.full((2, 3, 1), 0.05), 4)
        assert rounded.shape == x.shape
        assert rounded.dtype == dtype
        assert (rounded[1, 1] == 0).all()
        rounded.backward(torch.full_like(x, 2.0))
        assert (x.grad == 2.0).all()


@BITS
@pytest.mark.parametrize("name", sorted(QUANTIZERS))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_falls_on_the_codes_of_float32(name: str, dtype: torch.dtype, bits: int):
    """A training in bfloat16 sees the grid that is deployed."""
    x_ND, scale_N1 = weights(50, 64, seed=8).to(dtype), torch.full((50, 1), 0.05)
    expected_ND = QUANTIZERS[name](x_ND.float(), scale_N1, bits)
    assert torch.equal(QUANTIZERS[name](x_ND, scale_N1, bits), expected_ND.to(dtype))


@pytest.mark.parametrize("name", sorted(QUANTIZERS))
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_token_that_is_not_finite_stays_visible(name: str, bad: float):
    x_ND = weights(3, 10, seed=6)
    x_ND[1, 4] = bad
    rounded_ND = QUANTIZERS[name](x_ND, torch.full((3, 1), 0.05), 4)
    assert rounded_ND[1].isnan().any()
    assert rounded_ND[[0, 2]].isfinite().all()


@pytest.mark.parametrize("name", sorted(QUANTIZERS))
@pytest.mark.parametrize("factor", [2.0**-6, 8.0])
def test_rounding_does_not_depend_on_the_unit_of_the_activations(name: str, factor: float):
    x_ND, scale_N1 = weights(5, 24, seed=7), torch.full((5, 1), 0.25)
    expected_ND = QUANTIZERS[name](x_ND, scale_N1, 4) * factor
    assert torch.equal(QUANTIZERS[name](x_ND * factor, scale_N1 * factor, 4), expected_ND)


def test_dual_takes_the_scale_of_the_policy():
    x_ND = torch.tensor([[0.1, -0.2, 5.0]])
    torch.testing.assert_close(dual(x_ND, torch.tensor([[0.1]]), 4), torch.tensor([[0.1, -0.2, 5.0]]))
