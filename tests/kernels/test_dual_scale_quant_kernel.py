"""The Triton kernel against the reference: values equal, gradients close, on odd shapes and layouts."""

from __future__ import annotations

import pytest
import torch
from interpreter import DEVICE, KERNELS_RUN, poison, run_interpreted, runs_the_kernel, starts_the_interpreter

if KERNELS_RUN:
    from reflux.kernels.dual_scale_quant import kernel
    from reflux.kernels.dual_scale_quant.reference import DualScale

SHAPES = [(1, 1), (1, 576), (2, 3, 63), (3, 1536), (2, 4097)]


@starts_the_interpreter
def test_in_the_interpreter():
    run_interpreted(__file__)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


def inputs(
    shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values with a few large channels, main scales, upstream gradient."""
    generator = torch.Generator().manual_seed(seed)
    x, upstream = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    x[..., ::17] *= 30
    scale = torch.rand(*shape[:-1], 1, generator=generator) * 0.3 + 0.1
    return x.to(DEVICE, dtype), scale.to(DEVICE, dtype), upstream.to(DEVICE, dtype)


def both(
    x: torch.Tensor, scale: torch.Tensor, upstream: torch.Tensor, bits: int
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Values, gradient of x, gradient of the scale: the kernel's and the reference's."""
    found = []
    for function in (kernel.DualScaleKernel, DualScale):
        leaf_x, leaf_scale = x.detach().requires_grad_(), scale.detach().requires_grad_()
        values = function.apply(leaf_x, leaf_scale, bits)
        values.backward(upstream)
        found.append((values.detach(), leaf_x.grad, leaf_scale.grad))
    return found


@runs_the_kernel
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_equals_the_reference(dtype: torch.dtype, shape: tuple[int, ...], bits: int):
    ours, theirs = both(*inputs(shape, dtype), bits)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])
    torch.testing.assert_close(ours[2], theirs[2])  # another order of summation
    assert [t.dtype for t in ours] == [dtype] * 3


@runs_the_kernel
def test_bfloat16_is_computed_in_float32():
    ours, theirs = both(*inputs((3, 576), torch.bfloat16), 4)
    # the interpreter cuts float32 to bfloat16 where a GPU rounds: one step of bfloat16 apart
    torch.testing.assert_close(ours[0], theirs[0], rtol=2**-7, atol=0)
    torch.testing.assert_close(ours[2], theirs[2], rtol=2**-6, atol=1e-2)


@runs_the_kernel
def test_the_scales_of_a_table_are_float32_beside_values_of_half_precision():
    x, scale, upstream = inputs((3, 63), torch.float16)
    ours, theirs = both(x, scale.float(), upstream, 4)
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[2], theirs[2])
    assert [t.dtype for t in ours] == [torch.float16, torch.float16, torch.float32]


@runs_the_kernel
def test_strided_inputs_and_gradients():
    x, scale, upstream = inputs((4, 3, 126))
    for change in (lambda t: t[..., ::2], lambda t: t.transpose(0, 1), lambda t: t[1:, :2]):
        strided = change(x)
        fitting = change(scale) if strided.shape[:-1] != scale.shape[:-1] else scale
        ours, theirs = both(strided, fitting, change(upstream), 4)
        assert torch.equal(ours[0], theirs[0])
        torch.testing.assert_close(ours[2], theirs[2])
    one_gradient_for_all = torch.ones((), device=DEVICE).expand(x.shape)  # what .sum().backward() sends: stride 0
    ours, theirs = both(x, scale, one_gradient_for_all, 4)
    torch.testing.assert_close(ours[2], theirs[2])


@runs_the_kernel
def test_ties_round_to_even_and_go_to_the_main_grid():
    steps = torch.tensor([[0.5, 1.5, -2.5, 3.5, -6.5, 7.5, 14.0, -14.0, 0.0, -0.0]], device=DEVICE)
    ours, theirs = both(steps, torch.ones(1, 1, device=DEVICE), torch.ones_like(steps), 4)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[2], theirs[2])


@runs_the_kernel
def test_zeros_and_extremes():
    rows = torch.tensor([0.0, 1e-38, 1e-4, 3e38, 6.5e4], device=DEVICE)[:, None] * torch.ones(1, 9, device=DEVICE)
    ours, theirs = both(rows, torch.full((5, 1), 1e-4, device=DEVICE), torch.ones_like(rows), 4)
    assert torch.equal(ours[0], theirs[0])
    assert (ours[0][0] == 0).all()


@runs_the_kernel
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_token_is_nan_and_breaks_no_other(bad: float):
    x, scale, upstream = inputs((3, 70))
    x[1, 65] = bad
    ours, theirs = both(x, scale, upstream, 4)
    assert ours[0][1].isnan().all()
    assert torch.equal(ours[0][[0, 2]], theirs[0][[0, 2]])


@runs_the_kernel
def test_no_tokens():
    ours, _ = both(*inputs((0, 64)), 4)
    assert ours[0].shape == (0, 64)
    assert ours[2].shape == (0, 1)
