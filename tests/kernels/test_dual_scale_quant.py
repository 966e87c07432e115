"""The reference against brute force: nearest point, values never worse than one grid, the gradient of the scale."""

from __future__ import annotations

import pytest
import torch

from reflux.kernels.dual_scale_quant import (
    dequantize,
    dual_scale_quant,
    largest_code,
    outlier_scale,
    quantize,
)

BITS = pytest.mark.parametrize("bits", [2, 3, 4, 8])


def tokens(rows: int, channels: int, seed: int = 0, outlier: float = 20.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [N, D] with a few large channels, main scales [N, 1]."""
    generator = torch.Generator().manual_seed(seed)
    x_ND = torch.randn(rows, channels, generator=generator)
    x_ND[:, :: max(2, channels // 3)] *= outlier
    return x_ND, torch.rand(rows, 1, generator=generator) * 0.3 + 0.1


@BITS
@pytest.mark.parametrize(("rows", "channels"), [(1, 1), (1, 63), (6, 33)])
def test_every_value_goes_to_the_nearest_point_of_both_grids(bits: int, rows: int, channels: int):
    x_ND, scale_N1 = tokens(rows, channels)
    found_ND = dual_scale_quant(x_ND, scale_N1, bits)
    codes = torch.arange(-largest_code(bits), largest_code(bits) + 1)
    for n in range(rows):
        main = scale_N1[n, 0]
        outlier = torch.maximum(x_ND[n].abs().max() / largest_code(bits), main)
        points_P = torch.cat([codes * main, codes * outlier])
        nearest_D = (x_ND[n, :, None] - points_P).abs().amin(-1)
        torch.testing.assert_close((found_ND[n] - x_ND[n]).abs(), nearest_D, atol=1e-5, rtol=1e-5)
        assert (found_ND[n, :, None] == points_P).any(-1).all()


@BITS
def test_never_worse_than_one_dynamic_grid_per_token(bits: int):
    x_ND, scale_N1 = tokens(50, 40, seed=1)
    top = largest_code(bits)
    plain_scale_N1 = x_ND.abs().amax(-1, keepdim=True) / top
    plain_ND = (x_ND / plain_scale_N1).round() * plain_scale_N1
    dual_ND = dual_scale_quant(x_ND, torch.minimum(scale_N1, plain_scale_N1), bits)
    assert ((dual_ND - x_ND).abs() <= (plain_ND - x_ND).abs() + 1e-6).all()


def test_a_main_grid_wider_than_the_token_is_the_only_grid():
    x_ND, _ = tokens(4, 16)
    scale_N1 = x_ND.abs().amax(-1, keepdim=True)  # 7 times what the largest value needs
    assert torch.equal(outlier_scale(x_ND, scale_N1, 4), scale_N1)
    _, is_outlier_ND = quantize(x_ND, scale_N1, outlier_scale(x_ND, scale_N1, 4), 4)
    assert not is_outlier_ND.any()


def test_the_largest_value_of_a_token_is_kept():
    x_ND, scale_N1 = tokens(9, 30, outlier=100.0)
    largest_N1 = x_ND.abs().argmax(-1, keepdim=True)
    kept_N1 = dual_scale_quant(x_ND, scale_N1, 4).gather(-1, largest_N1)
    torch.testing.assert_close(kept_N1, x_ND.gather(-1, largest_N1))


def test_a_tie_between_the_grids_goes_to_the_main_grid():
    x_ND, scale_N1 = torch.tensor([[3.5, 14.0]]), torch.ones(1, 1)  # 3.5 lies between 4 * 1 and 2 * 2 alike
    codes_ND, is_outlier_ND = quantize(x_ND, scale_N1, outlier_scale(x_ND, scale_N1, 4), 4)
    assert codes_ND.tolist() == [[4, 7]]
    assert is_outlier_ND.tolist() == [[False, True]]


def test_codes_and_flags_stand_for_the_values():
    x_ND, scale_N1 = tokens(5, 21, seed=2)
    step_N1 = outlier_scale(x_ND, scale_N1, 4)
    codes_ND, is_outlier_ND = quantize(x_ND, scale_N1, step_N1, 4)
    assert codes_ND.dtype == torch.int8
    assert codes_ND.abs().max() <= 7
    assert torch.equal(dequantize(codes_ND, is_outlier_ND, scale_N1, step_N1), dual_scale_quant(x_ND, scale_N1, 4))


def test_zeros_stay_zero():
    assert torch.equal(dual_scale_quant(torch.zeros(2, 3, 8), torch.ones(2, 3, 1), 4), torch.zeros(2, 3, 8))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_token_is_nan_and_breaks_no_other(bad: float):
    x_ND, scale_N1 = tokens(3, 12)
    expected_ND = dual_scale_quant(x_ND, scale_N1, 4)
    x_ND[1, 7] = bad
    found_ND = dual_scale_quant(x_ND, scale_N1, 4)
    assert found_ND[1].isnan().all()
    assert torch.equal(found_ND[[0, 2]], expected_ND[[0, 2]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_computed_in_float32(dtype: torch.dtype):
    x_ND, scale_N1 = (t.to(dtype) for t in tokens(8, 64, seed=3))
    expected_ND = dual_scale_quant(x_ND.float(), scale_N1.float(), 4)
    assert torch.equal(dual_scale_quant(x_ND, scale_N1, 4), expected_ND.to(dtype))


def test_layout_and_leading_dimensions_do_not_matter():
    x_ND, scale_N1 = tokens(12, 20, seed=4)
    expected_ND = dual_scale_quant(x_ND, scale_N1, 4)
    wide_ND = torch.randn(12, 40)
    wide_ND[:, ::2] = x_ND
    assert torch.equal(dual_scale_quant(wide_ND[:, ::2], scale_N1, 4), expected_ND)
    turned = dual_scale_quant(x_ND.reshape(3, 4, 20).transpose(0, 1), scale_N1.reshape(3, 4, 1).transpose(0, 1), 4)
    assert torch.equal(turned, expected_ND.reshape(3, 4, 20).transpose(0, 1))


def test_one_scale_for_several_tokens_gathers_their_gradients():
    x_ND, _ = tokens(6, 20, seed=5)
    shared_1T1 = torch.tensor([0.1, 0.2, 0.3]).reshape(1, 3, 1).requires_grad_()
    each_BT1 = shared_1T1.detach().expand(2, 3, 1).clone().requires_grad_()
    x_BTD = x_ND.reshape(2, 3, 20)
    upstream_BTD = torch.randn(2, 3, 20)
    dual_scale_quant(x_BTD, shared_1T1, 4).backward(upstream_BTD)
    dual_scale_quant(x_BTD, each_BT1, 4).backward(upstream_BTD)
    torch.testing.assert_close(shared_1T1.grad, each_BT1.grad.sum(0, keepdim=True))


@BITS
@pytest.mark.parametrize("channels", [1, 63])
def test_gradients_are_those_of_learned_step_sizes(bits: int, channels: int):
    """LSQ eq. 3, value by value: the derivative of the straight-through surrogate of the grid that was taken."""
    x_ND, scale_N1 = tokens(5, channels, seed=6)
    x_ND, scale_N1 = x_ND.requires_grad_(), scale_N1.requires_grad_()
    upstream_ND = torch.randn(5, channels)
    dual_scale_quant(x_ND, scale_N1, bits).backward(upstream_ND)
    assert torch.equal(x_ND.grad, upstream_ND)
    top = largest_code(bits)
    _, is_outlier_ND = quantize(x_ND.detach(), scale_N1.detach(), outlier_scale(x_ND, scale_N1, bits).detach(), bits)
    for n in range(5):
        expected = 0.0
        for d in range(channels):
            ratio = x_ND[n, d].item() / scale_N1[n].item()
            step = -top if ratio <= -top else top if ratio >= top else round(ratio) - ratio
            expected += upstream_ND[n, d].item() * (0.0 if is_outlier_ND[n, d] else step)
        assert scale_N1.grad[n].item() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_gradient_of_the_scale_by_finite_differences():
    """With the rounding residue held where it is, the values are linear in the scale, away from ties and edges."""
    x_ND, scale_N1 = tokens(4, 50, seed=7)
    x_ND, scale_N1 = x_ND.double(), scale_N1.double()
    step_N1 = outlier_scale(x_ND, scale_N1, 4).double()
    codes_ND, is_outlier_ND = quantize(x_ND, scale_N1, step_N1, 4)
    residue_ND = codes_ND - x_ND / scale_N1
    clipped_ND = (x_ND / scale_N1).abs() >= 7

    def surrogate(scale: torch.Tensor) -> torch.Tensor:
        main_ND = torch.where(clipped_ND, codes_ND * scale, x_ND + residue_ND * scale)
        return torch.where(is_outlier_ND, codes_ND * step_N1, main_ND).sum(-1, keepdim=True)

    difference_N1 = (surrogate(scale_N1 + 1e-6) - surrogate(scale_N1 - 1e-6)) / 2e-6
    single_N1 = scale_N1.float().requires_grad_()
    dual_scale_quant(x_ND.float(), single_N1, 4).sum().backward()
    torch.testing.assert_close(single_N1.grad.double(), difference_N1, rtol=1e-3, atol=1e-3)


def test_no_graph_is_kept_for_a_scale_that_does_not_learn():
    x_ND, scale_N1 = tokens(2, 8)
    rounded_ND = dual_scale_quant(x_ND.requires_grad_(), scale_N1, 4)
    assert rounded_ND.grad_fn.saved_tensors == ()


@pytest.mark.parametrize("shape", [(3, 8), (3,), (2, 3, 1)])
def test_scales_that_do_not_fit_are_refused(shape: tuple[int, ...]):
    with pytest.raises(ValueError, match="one scale per token"):
        dual_scale_quant(torch.ones(3, 8), torch.ones(shape), 4)


@pytest.mark.parametrize("bits", [1, 9, 16])
def test_bits_beyond_int8_are_refused(bits: int):
    with pytest.raises(ValueError, match=f"bits {bits}"):
        dual_scale_quant(torch.ones(3, 8), torch.ones(3, 1), bits)
