"""The position table: literal interpolation, what gradients reach, and the check that stops a saturated one."""

from __future__ import annotations

import pytest
import torch

from reflux.components.algorithms.policies import (
    KNOTS,
    SCALE_RANGE,
    PositionTable,
    interpolate,
    interpolation_error,
    knots_of,
    nearest_knot,
)

SITES = ["layers.0.attn_in", "layers.0.mlp_in", "layers.1.attn_in"]


def table(knots: tuple[int, ...] = KNOTS) -> PositionTable:
    scales = torch.rand(len(SITES), len(knots), 2, generator=torch.Generator().manual_seed(0)) + 0.1
    return PositionTable(SITES, scales, knots)


def literal(values: list[float], knots: tuple[int, ...], position: int) -> float:
    if position >= knots[-1]:
        return values[-1]
    if position <= knots[0]:
        return values[0]
    right = next(i for i, knot in enumerate(knots) if knot > position)
    share = (position - knots[right - 1]) / (knots[right] - knots[right - 1])
    return values[right - 1] * (1 - share) + values[right] * share


@pytest.mark.parametrize("knots", [KNOTS, (0, 3, 4, 11), (5, 9), (0,)])
def test_interpolates_by_the_formula(knots: tuple[int, ...]):
    policy = table(knots)
    positions = sorted({*range(40), *knots, *(k + 1 for k in knots), 700, 1535, 2047, 2049, 10**6})
    for site in SITES:
        values = policy.scales()[policy.index[site], :, 0].tolist()
        found_SBT = policy.main_scales(torch.tensor(positions)[None])
        assert found_SBT.shape == (len(SITES), 1, len(positions))
        expected = [literal(values, knots, position) for position in positions]
        torch.testing.assert_close(found_SBT[policy.index[site], 0], torch.tensor(expected), rtol=1e-5, atol=0)


def test_positions_may_be_of_any_shape_and_layout():
    position_BT = torch.arange(12).reshape(3, 4)
    policy = table()
    straight_SBT, turned_STB = policy.main_scales(position_BT), policy.main_scales(position_BT.T)
    assert torch.equal(straight_SBT.transpose(1, 2), turned_STB)


def test_the_gradient_reaches_only_the_two_knots_around_a_position():
    assert KNOTS[5:7] == (16, 32)
    for position, share in ((16, {5: 1.0}), (20, {5: 0.75, 6: 0.25}), (24, {5: 0.5, 6: 0.5}), (10**6, {12: 1.0})):
        values_P = torch.rand(len(KNOTS)).requires_grad_()
        interpolate(values_P[None], torch.tensor(KNOTS), torch.tensor([[position]])).sum().backward()
        found = {i: g for i, g in enumerate(values_P.grad.tolist()) if g}
        assert found == pytest.approx(share)


def test_the_gradient_of_one_site_leaves_the_others_alone():
    policy = table()
    policy.main_scales(torch.tensor([[3]]))[1].sum().backward()
    touched = policy.log_main_SP.grad.nonzero().tolist()
    assert touched == [[1, 2], [1, 3]]
    main = policy.scales()[1, :, 0]
    # d scale / d log scale = scale
    torch.testing.assert_close(policy.log_main_SP.grad[1, 2:4], main[2:4] / 2)


def test_the_table_that_is_deployed_is_the_one_given():
    scales = torch.rand(3, len(KNOTS), 2) + 0.1
    torch.testing.assert_close(PositionTable(SITES, scales).scales(), scales)
    assert not PositionTable(SITES, scales).scales().requires_grad


@pytest.mark.parametrize("bad", [SCALE_RANGE[0] / 2, SCALE_RANGE[1] * 2, float("nan"), float("inf"), 0.0])
def test_check_names_the_site_and_position_of_a_saturated_scale(bad: float):
    policy = table()
    policy.check()
    with torch.no_grad():
        policy.log_main_SP[1, 4] = torch.tensor(bad).log()
    with pytest.raises(ValueError, match=r"main scale of layers\.0\.mlp_in at position 8 is"):
        policy.check()


def test_a_table_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"policy table \(3, 4, 2\): 3 sites and 13 knots need \(3, 13, 2\)"):
        PositionTable(SITES, torch.ones(3, 4, 2))


@pytest.mark.parametrize("knots", [(0, 2, 2), (0, 4, 2), (-1, 3, 5)])
def test_knots_that_do_not_rise_are_refused(knots: tuple[int, ...]):
    with pytest.raises(ValueError, match=r"policy knots .* must be positions"):
        PositionTable(SITES, torch.ones(3, 3, 2), knots)


def test_a_site_named_twice_is_refused():
    with pytest.raises(ValueError, match="site 'a' is named twice"):
        PositionTable(["a", "b", "a"], torch.ones(3, len(KNOTS), 2))


def test_nearest_knot_by_brute_force():
    positions = torch.arange(3000)
    for position, index in zip(positions.tolist(), nearest_knot(positions).tolist(), strict=True):
        assert abs(KNOTS[index] - position) == min(abs(knot - position) for knot in KNOTS)


def test_a_main_grid_ends_where_it_did_at_other_bits() -> None:
    table = PositionTable(["a", "b", "c"], torch.arange(1.0, 13.0).reshape(3, 2, 2), (0, 1))
    other = table.for_bits({"a": 4, "b": 8}, chosen_for=4)
    assert torch.equal(other.scales()[[0, 2]], table.scales()[[0, 2]])
    torch.testing.assert_close(other.scales()[1] * 127, table.scales()[1] * 7)
    assert table.for_bits({"a": 4, "b": 4, "c": 4}, chosen_for=4) is table


def test_interpolation_error_by_the_formula_and_none_where_scales_lie_on_straight_lines():
    straight_ST = torch.stack([torch.arange(1.0, 21.0), torch.full((20,), 0.3)])
    torch.testing.assert_close(interpolation_error(straight_ST, (0, 5, 19, 40)), torch.zeros(2))
    curved_T = torch.arange(1.0, 11.0).rsqrt()
    expected = [abs(literal([curved_T[k].item() for k in (0, 3, 8)], (0, 3, 8), t) / curved_T[t].item() - 1)
                for t in range(10)]  # fmt: skip
    assert interpolation_error(curved_T[None], (0, 3, 8, 64)).item() == pytest.approx(sum(expected) / 10, rel=1e-5)


def test_one_row_for_each_doubling_is_the_default_and_four_stand_closer():
    assert knots_of(1) == KNOTS
    assert knots_of(4)[:16] == (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 13, 16, 19, 23, 27)
    assert set(KNOTS) <= set(knots_of(4))
    assert knots_of(4)[-1] == KNOTS[-1]
