"""What becomes of cached numbers, against loops over their groups in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reflux.components.algorithms.kv_forms import (
    KV_FORMS,
    KvForm,
    check_kv_cache,
    rounded_group,
    rounded_keys,
    rounded_per_token,
    rounded_values,
)

SMALLEST = 2.0**-14


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """With channels of very different size and off zero, as keys have them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    size = torch.linspace(0.01, 40, shape[-1], dtype=torch.float64)
    return x * size + 3 * size.flip(0)


def between(x: np.ndarray, bits: int) -> np.ndarray:
    """One group, 2^bits steps from its smallest to its largest number."""
    top = 2**bits - 1
    zero = float(np.float16(x.min()))
    scale = max(float(np.float16((x.max() - x.min()) / top)), SMALLEST)
    return np.clip(np.round((x - zero) / scale), 0, top) * scale + zero


@pytest.mark.parametrize("bits", [8, 4])
def test_a_token_and_head_has_one_symmetric_grid(bits: int) -> None:
    x_BHTD = numbers(2, 3, 5, 16)
    rounded_BHTD = rounded_per_token(x_BHTD, bits)
    top = 2 ** (bits - 1) - 1
    for index in np.ndindex(2, 3, 5):
        x_D = x_BHTD[index].numpy()
        scale = float(np.float16(np.abs(x_D).max() / top))
        expected_D = np.clip(np.round(x_D / scale), -top, top) * scale
        np.testing.assert_allclose(rounded_BHTD[index].numpy(), expected_D, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["kivi4", "kivi2"])
def test_keys_have_a_grid_for_each_channel_of_a_group_of_tokens(name: str) -> None:
    form = KV_FORMS[name]
    key_BHTD = numbers(2, 2, 80, 16)
    group_BT = torch.stack([torch.arange(80) // form.group, (torch.arange(80) + 7) // form.group])
    rounded_BHTD = rounded_keys(key_BHTD, group_BT, form.bits)
    for b, h, d in np.ndindex(2, 2, 16):
        for group in range(int(group_BT[b].max()) + 1):
            members = (group_BT[b] == group).numpy()
            expected = between(key_BHTD[b, h, members, d].numpy(), form.bits)
            np.testing.assert_allclose(rounded_BHTD[b, h, members, d].numpy(), expected, rtol=0, atol=1e-12)
    one = rounded_group(key_BHTD[0, :, : form.group].transpose(0, 1), form.bits)  # [G, H, D]
    assert torch.equal(one.transpose(0, 1), rounded_BHTD[0, :, : form.group])


@pytest.mark.parametrize(("channels", "size"), [(16, 16), (64, 32), (80, 16), (96, 32)])
def test_values_have_a_grid_for_each_group_of_channels_of_a_token(channels: int, size: int) -> None:
    form = KV_FORMS["kivi4"]
    assert form.value_group(channels) == size
    value_BHTD = numbers(1, 2, 3, channels)
    rounded_BHTD = rounded_values(value_BHTD, form)
    for h, t in np.ndindex(2, 3):
        for begin in range(0, channels, size):
            expected = between(value_BHTD[0, h, t, begin : begin + size].numpy(), 4)
            got = rounded_BHTD[0, h, t, begin : begin + size].numpy()
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


def test_a_window_is_left_a_whole_group_at_a_time() -> None:
    form = KvForm(bits=4, group=32, window=32)
    positions = torch.tensor([0, 31, 63, 64, 95, 96, 127, 128])
    assert form.settled(positions).tolist() == [0, 0, 0, 32, 32, 64, 64, 96]
    assert [form.rounded_of(n) for n in (0, 63, 64, 512)] == [0, 0, 32, 480]
    assert KV_FORMS["int8"].rounded_of(5) == 5
    for name in ("kivi4", "kivi2"):
        form = KV_FORMS[name]
        every = torch.arange(400)
        settled = form.settled(every)
        assert bool((settled <= (every - form.window).clamp(min=0)).all())  # the window is never rounded
        assert bool((every - settled < form.window + form.group).all())
        assert bool((settled % form.group == 0).all())


def test_more_bits_are_nearer_and_no_number_is_further_than_half_a_step() -> None:
    x_BHTD = numbers(1, 2, 64, 16)
    group_BT = torch.arange(64)[None] // 32
    error = {bits: (rounded_keys(x_BHTD, group_BT, bits) - x_BHTD).abs().mean().item() for bits in (2, 4, 8)}
    assert error[8] < error[4] / 8 < error[2] / 16
    for begin in (0, 32):
        keys = x_BHTD[:, :, begin : begin + 32]
        step = (keys.amax(2, keepdim=True) - keys.amin(2, keepdim=True)) / 15
        off = (rounded_keys(x_BHTD, group_BT, 4)[:, :, begin : begin + 32] - keys).abs()
        assert bool((off <= 0.51 * step + 2e-3 * keys.abs().amax()).all())  # 2e-3: the zero point's float16


def test_numbers_that_do_not_differ_are_kept() -> None:
    same = torch.full((1, 1, 32, 16), 0.75)
    assert torch.equal(rounded_keys(same, torch.zeros(1, 32, dtype=torch.int64), 2), same)
    assert torch.equal(rounded_values(same, KV_FORMS["kivi2"]), same)
    assert torch.equal(rounded_per_token(torch.zeros(1, 1, 2, 16), 4), torch.zeros(1, 1, 2, 16))


def test_gradients_pass_straight_through() -> None:
    x_BHTD = numbers(1, 1, 32, 16).requires_grad_()
    weight_BHTD = numbers(1, 1, 32, 16, seed=1)
    group_BT = torch.zeros(1, 32, dtype=torch.int64)
    for rounded in (
        rounded_per_token(x_BHTD, 4), rounded_keys(x_BHTD, group_BT, 2), rounded_values(x_BHTD, KV_FORMS["kivi2"]),
    ):  # fmt: skip
        (grad_BHTD,) = torch.autograd.grad((rounded * weight_BHTD).sum(), x_BHTD)
        assert torch.equal(grad_BHTD, weight_BHTD)


def test_half_precision_stays_what_it_is() -> None:
    x_BHTD = numbers(1, 1, 32, 16).to(torch.bfloat16)
    group_BT = torch.zeros(1, 32, dtype=torch.int64)
    assert rounded_keys(x_BHTD, group_BT, 4).dtype == torch.bfloat16
    assert torch.equal(rounded_per_token(x_BHTD, 8), rounded_per_token(x_BHTD.float(), 8).to(torch.bfloat16))


def test_an_unknown_form_is_refused_with_those_that_are_known() -> None:
    check_kv_cache("full")
    with pytest.raises(ValueError, match="kv_cache 'fp8': allowed are full, int8, int4, kivi4, kivi2"):
        check_kv_cache("fp8")
