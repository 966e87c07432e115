"""Products of codes on torch's CPU kernels: integers are exact, values are those of the imitated forward.

Shapes: O outputs, I inputs, G groups of S inputs, N tokens, R rows of codes.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from reflux.components.algorithms.cpu_kernels import (
    CodedLinear,
    CodedWeight,
    Int4Linear,
    IntegerLinear,
    coded_rows,
)
from reflux.components.algorithms.layer_bits import TERNARY
from reflux.components.algorithms.quantizers import QUANTIZERS, weight_codes, weight_values, zero_points


def coded(
    bits: int, group_size: int, outputs: int = 32, inputs: int = 192, *, has_zero_points: bool = False
) -> CodedWeight:
    weight_OI = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(bits))
    zero_OG = zero_points(weight_OI.add_(0.5), bits, group_size) if has_zero_points else None
    codes_OI, scale_OG = weight_codes(weight_OI, bits, group_size, zero_OG=zero_OG)
    return CodedWeight(bits=bits, codes_OI=codes_OI, scale_OG=scale_OG, zero_OG=zero_OG)


def activations(tokens: int, inputs: int = 192) -> tuple[Tensor, Tensor]:
    """[1, N, I] with a few values far out, and a main scale per token."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(1, tokens, inputs, generator=generator)
    x[..., ::37] *= 30
    return x, 0.1 + torch.rand(1, tokens, 1, generator=generator)


@pytest.mark.parametrize("activation", ["plain", "dual"])
@pytest.mark.parametrize(
    ("weight_bits", "has_zero_points", "bits"),
    [(4, False, 4), (4, False, 8), (8, False, 8), (2, False, 4), (8, False, 4), (TERNARY, False, 8), (4, True, 4),
     (8, True, 8), (3, True, 8)],
)  # fmt: skip
@pytest.mark.parametrize(("tokens", "group_size"), [(1, 64), (5, 64), (300, 192)])
def test_the_integer_path_is_the_imitated_one(
    activation: str, weight_bits: int, has_zero_points: bool, bits: int, tokens: int, group_size: int
) -> None:
    weight, (x, main_scale) = coded(weight_bits, group_size, has_zero_points=has_zero_points), activations(tokens)
    linear = IntegerLinear(weight, torch.arange(32.0))
    linear.incoming = rows = coded_rows(x, main_scale, bits, activation)
    rounded = QUANTIZERS[activation](x, main_scale, bits)
    restored = (rows.codes_RI * rows.scale_R1).reshape(rows.grids, tokens, -1).sum(0)
    assert torch.equal(restored, rounded[0])  # the codes and scales of the forward that is trained, to the bit
    assert rows.grids == {"plain": 1, "dual": 2}[activation]
    steps_OI = weight.codes_OI.numpy().astype(np.int64)
    if weight.zero_OG is not None:
        steps_OI -= weight.zero_OG.numpy().repeat(group_size, 1)
    sums_GRO = np.einsum(
        "rgs,ogs->gro",
        rows.codes_RI.numpy().astype(np.int64).reshape(len(rows.codes_RI), -1, group_size),
        steps_OI.reshape(len(steps_OI), -1, group_size),
    )
    np.testing.assert_array_equal(linear.group_sums(rows.codes_RI).numpy(), sums_GRO)
    values_OI = weight_values(weight.codes_OI, weight.scale_OG, weight.zero_OG)
    expected = nn.functional.linear(rounded, values_OI, torch.arange(32.0))
    torch.testing.assert_close(linear(x), expected, rtol=1e-4, atol=1e-3 * expected.std().item())
    assert torch.equal(linear.weight, values_OI)


def test_sums_of_a_group_are_exact_integers_even_at_the_ends_of_their_range() -> None:
    codes_OI = torch.full((16, 128), -128, dtype=torch.int8)
    linear = IntegerLinear(CodedWeight(bits=8, codes_OI=codes_OI, scale_OG=torch.ones(16, 2)), None)
    rows = torch.tensor([[127] * 128, [-127] * 64 + [127] * 64], dtype=torch.int8)
    sums_GRO = linear.group_sums(rows)
    assert sums_GRO.dtype == torch.int32
    assert sums_GRO[:, :, 0].tolist() == [[-128 * 127 * 64, 128 * 127 * 64], [-128 * 127 * 64, -128 * 127 * 64]]
    zero_OG = torch.full((16, 2), 127, dtype=torch.int8)
    linear = IntegerLinear(CodedWeight(bits=8, codes_OI=codes_OI, scale_OG=torch.ones(16, 2), zero_OG=zero_OG), None)
    assert linear.group_sums(rows)[:, :, 0].tolist() == [
        [-255 * 127 * 64, 255 * 127 * 64], [-255 * 127 * 64, -255 * 127 * 64]
    ]  # fmt: skip


def test_the_integer_path_keeps_what_is_not_finite() -> None:
    x, main_scale = activations(3)
    x[0, 1, 5] = torch.inf
    linear = IntegerLinear(coded(4, 64), None)
    linear.incoming = coded_rows(x, main_scale, 4, "dual")
    y = linear(x)
    assert y[0, 1].isnan().all()
    assert y[0, [0, 2]].isfinite().all()


def test_without_codes_the_weight_is_restored() -> None:
    weight, (x, _) = coded(4, 64), activations(3)
    expected = nn.functional.linear(x, weight_values(weight.codes_OI, weight.scale_OG))
    torch.testing.assert_close(IntegerLinear(weight, None)(x), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("linear", [IntegerLinear(coded(4, 64), None), Int4Linear(coded(4, 64), None, torch.bfloat16)])
def test_codes_of_other_hidden_states_are_refused(linear: CodedLinear) -> None:
    x, main_scale = activations(3)
    linear.incoming = coded_rows(x, main_scale, 4, "dual")
    with pytest.raises(ValueError, match="a block changes its hidden states before its linears read them"):
        linear(x.clone())


def test_an_activation_without_an_integer_form_is_named() -> None:
    with pytest.raises(ValueError, match="activation 'triple': has no integer kernel, allowed are 'dual' and 'plain'"):
        coded_rows(activations(1)[0], None, 4, "triple")


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("has_zero_points", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_four_bit_weights_meet_activations_in_floating_point(
    bits: int, has_zero_points: bool, dtype: torch.dtype, tolerance: float
) -> None:
    weight, (x, _) = coded(bits, 64, has_zero_points=has_zero_points), activations(5)
    linear = Int4Linear(weight, torch.arange(32.0), dtype)
    assert linear.packed_OP.numel() == weight.codes_OI.numel() / 2
    values_OI = weight_values(weight.codes_OI, weight.scale_OG, weight.zero_OG)
    expected = nn.functional.linear(x, values_OI, torch.arange(32.0))
    error = (linear(x.to(dtype)).float() - expected).norm() / expected.norm()
    assert error < tolerance


@pytest.mark.parametrize("activation", ["plain", "dual"])
@pytest.mark.parametrize(("weight_bits", "has_zero_points"), [(4, False), (4, True), (3, True), (TERNARY, False)])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("tokens", [1, 70])
def test_four_bit_weights_meet_codes_of_activations_whole(
    activation: str, weight_bits: int, has_zero_points: bool, bits: int, tokens: int
) -> None:
    weight, (x, main_scale) = coded(weight_bits, 64, has_zero_points=has_zero_points), activations(tokens)
    linear = Int4Linear(weight, torch.arange(32.0), torch.bfloat16)
    linear.incoming = coded_rows(x, main_scale, bits, activation)
    rounded = QUANTIZERS[activation](x, main_scale, bits)
    values_OI = weight_values(weight.codes_OI, weight.scale_OG, weight.zero_OG)
    expected = nn.functional.linear(rounded, values_OI, torch.arange(32.0))
    assert (linear(x) - expected).norm() / expected.norm() < 4e-3  # a scale, an offset and a sum, each of 8 bits


@pytest.mark.parametrize("bits", [4, 8])
def test_bfloat16_holds_all_codes_of_activations(bits: int) -> None:
    codes = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1), dtype=torch.int8)
    assert torch.equal(codes.to(torch.bfloat16).float(), codes.float())


@pytest.mark.parametrize(("bits", "group_size", "outputs"), [(8, 64, 32), (4, 48, 32), (4, 64, 24)])
def test_what_the_four_bit_kernel_does_not_take_is_named(bits: int, group_size: int, outputs: int) -> None:
    with pytest.raises(ValueError, match=rf"weight_bits {bits}, group_size {group_size}, {outputs} outputs: torch's"):
        Int4Linear(coded(bits, group_size, outputs), None, torch.bfloat16)
