"""Compute power: values worked out by hand, literal loops, and what must hold for every sequence and every padding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reflux.components.algorithms.power import FLOOR, min_max, moving_average, power_distribution, window_statistics

ATTENTION = torch.tensor([1.0, 0.0, 0.0])


def one_feature(values: list[float]) -> torch.Tensor:
    """[1, T, 3] with these values as attention and noise that attention alone does not weigh."""
    return torch.stack([torch.tensor(values), torch.arange(len(values)) * 7.0, torch.rand(len(values))], -1)[None]


def test_five_tokens_worked_out_by_hand() -> None:
    """1 2 3 4 10 -> averages 2, 5/2, 4, 19/4, 17/3 -> min-max 0, 3/22, 6/11, 3/4, 1 -> + 1e-6, over their sum."""
    power_T = power_distribution(one_feature([1, 2, 3, 4, 10]), torch.ones(1, 5), ATTENTION)[0]
    levels = [0 + FLOOR, 3 / 22 + FLOOR, 6 / 11 + FLOOR, 3 / 4 + FLOOR, 1 + FLOOR]
    assert sum(levels) == pytest.approx(107 / 44 + 5e-6)
    assert power_T.tolist() == pytest.approx([level / sum(levels) for level in levels], rel=1e-12)


def test_the_published_sum_has_no_common_scale_and_ours_has() -> None:
    """Attention falls as the norm rises to a thousand: half of each is even, but unscaled it is the norm alone."""
    rising_T = torch.linspace(0, 1, 12).double()
    features_BTF = torch.stack([0.9 - 0.8 * rising_T, 1000 * rising_T, torch.zeros(12)], -1)[None]
    half = torch.tensor([0.5, 0.5, 0.0])
    published_T = power_distribution(features_BTF, torch.ones(1, 12), half, scaled=False)[0]
    norm_alone_T = power_distribution(features_BTF, torch.ones(1, 12), torch.tensor([0.0, 1.0, 0.0]))[0]
    torch.testing.assert_close(published_T, norm_alone_T)
    ours_T = power_distribution(features_BTF, torch.ones(1, 12), half)[0]
    torch.testing.assert_close(ours_T, torch.full((12,), 1 / 12).double())


def literal(values: list[list[float]], mask: list[bool], weights: list[float]) -> list[float]:
    """The definition, token by token, in Python's floats."""
    valid = [t for t, is_valid in enumerate(mask) if is_valid]
    if not valid:
        return [0.0] * len(mask)

    def stretched(of: dict[int, float]) -> dict[int, float]:
        low, high = min(of.values()), max(of.values())
        flat = high - low <= 1e-9 * max(abs(low), abs(high))
        return {t: 0.0 if flat else (x - low) / (high - low) for t, x in of.items()}

    scaled = [stretched({t: values[t][f] for t in valid}) for f in range(3)]
    score = {t: sum(weight * scaled[f][t] for f, weight in enumerate(weights)) for t in valid}
    smooth = {}
    for t in valid:
        near = [score[u] for u in range(t - 2, t + 3) if u in score]
        smooth[t] = sum(near) / len(near)
    level = {t: x + 1e-6 for t, x in stretched(smooth).items()}
    return [level[t] / sum(level.values()) if t in level else 0.0 for t in range(len(mask))]


numbers = st.integers(-1000, 1000).map(lambda n: n / 8)  # exact, so that equal stays equal


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[list[float]], list[bool], list[float]]:
    tokens = draw(st.integers(1, 12))
    values = draw(st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=tokens, max_size=tokens))
    mask = draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))
    tenths = sorted(draw(st.lists(st.integers(0, 10), min_size=2, max_size=2)))
    return values, mask, [tenths[0] / 10, (tenths[1] - tenths[0]) / 10, (10 - tenths[1]) / 10]


@settings(deadline=None, max_examples=150)
@given(sequences())
def test_it_is_the_definition_and_a_distribution_over_valid_tokens(sequence) -> None:
    values, mask, weights = sequence
    weights_F = torch.tensor(weights, dtype=torch.float64)  # what ties in tenths has to tie here
    power_T = power_distribution(torch.tensor([values]), torch.tensor([mask]), weights_F)[0]
    assert power_T.sum().item() == pytest.approx(1.0 if any(mask) else 0.0, abs=1e-12)
    assert [(p > 0) for p in power_T.tolist()] == mask
    assert power_T.tolist() == pytest.approx(literal(values, mask, weights), abs=1e-7)


@settings(deadline=None, max_examples=100)
@given(sequences(), st.integers(1, 50), st.sampled_from([math.nan, math.inf, -1e30, 0.0]))
def test_padding_never_leaks(sequence, pads: int, poison: float) -> None:
    values, mask, weights = sequence
    alone_T = power_distribution(torch.tensor([values]), torch.tensor([mask]), torch.tensor(weights))[0]
    padded_values = [row if valid else [poison] * 3 for row, valid in zip(values, mask, strict=True)]
    padded = power_distribution(
        torch.tensor([[*padded_values, *[[poison] * 3] * pads]]),
        torch.tensor([[*mask, *[False] * pads]]),
        torch.tensor(weights),
    )[0]
    torch.testing.assert_close(padded[: len(mask)], alone_T, rtol=1e-12, atol=1e-15)
    assert (padded[len(mask) :] == 0).all()


def test_a_batch_is_its_sequences() -> None:
    features_BTF = torch.randn(3, 9, 3, generator=torch.Generator().manual_seed(0))
    mask_BT = torch.arange(9) < torch.tensor([[9], [4], [1]])
    weights = torch.tensor([0.2, 0.5, 0.3])
    together_BT = power_distribution(features_BTF, mask_BT, weights)
    for row, tokens in enumerate((9, 4, 1)):
        alone_T = power_distribution(features_BTF[row : row + 1, :tokens], torch.ones(1, tokens), weights)[0]
        torch.testing.assert_close(together_BT[row, :tokens], alone_T)


def test_the_order_matters() -> None:
    """Three tokens and two pads that hold 100. Smoothed before the mask, the last tokens take the pads' values, so that
    the falling scores 3 2 1 come out rising.
    """
    score_BT, mask_BT = torch.tensor([[3.0, 2.0, 1.0, 100.0, 100.0]]), torch.tensor([[1, 1, 1, 0, 0]])
    ours_T = power_distribution(one_feature(score_BT[0].tolist()), mask_BT, ATTENTION)[0, :3]
    torch.testing.assert_close(ours_T, torch.full((3,), 1 / 3).double())  # each average is over all three

    leaked_BT = moving_average(score_BT, torch.ones(1, 5), 5)
    wrong_BT = min_max(leaked_BT[..., None], mask_BT)[..., 0] + FLOOR
    wrong_T = (wrong_BT * mask_BT / (wrong_BT * mask_BT).sum())[0, :3]
    assert wrong_T.tolist() == sorted(wrong_T.tolist())
    assert (wrong_T - ours_T).abs().max() > 0.3


def test_without_the_floor_a_token_has_exactly_no_power() -> None:
    level_T = min_max(torch.tensor([[[1.0], [2.0]]]), torch.ones(1, 2))[0, :, 0]
    assert level_T.log().min() == -torch.inf  # what a divergence would multiply with
    assert power_distribution(one_feature([1, 2, 3, 9, 9, 9]), torch.ones(1, 6), ATTENTION).log().isfinite().all()


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_equal_tokens_share_equally(tokens: int) -> None:
    power_T = power_distribution(torch.ones(1, tokens, 3), torch.ones(1, tokens), torch.tensor([0.3, 0.3, 0.4]))[0]
    torch.testing.assert_close(power_T, torch.full((tokens,), 1 / tokens).double())


def test_groups_are_scaled_among_themselves() -> None:
    """Small values of one kind and large ones of another: apart, each kind spans [0, 1]."""
    x_BTF = torch.tensor([[[0.0], [1.0], [2.0], [100.0], [300.0]]])
    group_BT = torch.tensor([[0, 0, 0, 5, 5]])
    apart_T = min_max(x_BTF, torch.ones(1, 5), group_BT)[0, :, 0]
    assert apart_T.tolist() == [0, 0.5, 1, 0, 1]
    assert min_max(x_BTF, torch.ones(1, 5))[0, 2, 0].item() == pytest.approx(2 / 300)


def test_coefficients_can_be_those_of_each_token() -> None:
    features_BTF = torch.rand(2, 8, 3, generator=torch.Generator().manual_seed(1))
    weights = torch.tensor([0.2, 0.5, 0.3])
    torch.testing.assert_close(
        power_distribution(features_BTF, torch.ones(2, 8), weights.expand(2, 8, 3)),
        power_distribution(features_BTF, torch.ones(2, 8), weights),
    )


def test_windows_of_a_known_distribution() -> None:
    """Even in the first 32 tokens, then one token with all there is."""
    power_T = torch.tensor([1.0] * 32 + [1.0, 0.0, 0.0])
    even, peak = window_statistics(power_T / power_T.sum())
    assert (even.first, even.tokens, even.std) == (0, 32, 0)
    assert even.entropy_nats == pytest.approx(math.log(32))
    assert (peak.first, peak.tokens, peak.entropy_nats) == (32, 3, 0)
    assert peak.std == pytest.approx(math.sqrt(2) / 3)
    assert window_statistics(torch.empty(0)) == []
