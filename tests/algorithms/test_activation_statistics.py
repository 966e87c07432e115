"""Running extremes against the whole sample, the chosen main scale against every candidate, moments of known shapes."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch

from reflux.components.algorithms.activation_statistics import (
    CANDIDATE_QUANTILES,
    SiteStatistics,
    best_main_scale,
    kurtosis,
    sarle_bimodality,
)
from reflux.components.algorithms.k_norm_steps import FINEST
from reflux.components.algorithms.policies import KNOTS, PositionTable


def activations(tokens: int, channels: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, channels, generator=torch.Generator().manual_seed(seed))


def test_batches_give_what_the_whole_gives():
    x_ND = activations(100, 24) * 3
    seen = SiteStatistics()
    for rows in x_ND.split([1, 40, 59]):
        seen.update(rows, torch.arange(min(2, len(rows))))
    assert seen.tokens == 100
    assert seen.absmax == x_ND.abs().max().item()
    assert seen.rms == pytest.approx(x_ND.double().pow(2).mean().sqrt().item())
    assert seen.token_absmax_mean == pytest.approx(x_ND.abs().amax(-1).double().mean().item())
    assert torch.equal(seen.sample(), x_ND[[0, 1, 2, 41, 42]])


def test_the_sample_does_not_keep_the_batch_alive():
    x_ND, seen = activations(5, 4), SiteStatistics()
    seen.update(x_ND, torch.tensor([3]))
    expected = x_ND[3].clone()
    x_ND.zero_()
    assert torch.equal(seen.sample()[0], expected)


def literal_error(x_ND: torch.Tensor, scale: float, top: int) -> float:
    """Squared error of the nearest point of both grids, by trying all points."""
    outlier_N1 = (x_ND.abs().amax(-1, keepdim=True) / top).clamp(min=scale)
    codes = torch.arange(-top, top + 1)
    points_NP = torch.cat([(codes * scale).expand(len(x_ND), -1), codes * outlier_N1], -1)
    return (x_ND[..., None] - points_NP[:, None]).abs().amin(-1).pow(2).sum().item()


@pytest.mark.parametrize("outlier", [1.0, 40.0])
def test_the_main_scale_is_the_best_of_the_candidates(outlier: float):
    x_ND = activations(30, 64, seed=1)
    x_ND[:, 5] *= outlier
    best = best_main_scale(x_ND, 4)
    magnitude = x_ND.abs().flatten().sort().values
    candidates = [magnitude[round(q * (len(magnitude) - 1))].item() / 7 for q in CANDIDATE_QUANTILES]
    errors = [literal_error(x_ND, scale, 7) for scale in candidates]
    assert any(best == pytest.approx(scale) for scale in candidates)
    assert literal_error(x_ND, best, 7) == pytest.approx(min(errors), rel=1e-4)
    if outlier > 1:
        assert best < candidates[-1]  # the main grid does not stretch to the outliers


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_silent_site_gets_a_scale_that_is_not_taken_for_a_saturated_one(bits: int):
    scale = best_main_scale(torch.zeros(4, 8), bits)
    table = PositionTable(["layers.0.down_in"], torch.full((1, len(KNOTS), 2), scale * FINEST))
    table.check()
    PositionTable(["layers.0.down_in"], torch.full((1, len(KNOTS), 2), scale)).for_bits(
        {"layers.0.down_in": 8}, chosen_for=bits
    ).check()


def test_moments_of_known_shapes():
    gaussian = torch.randn(200_000, generator=torch.Generator().manual_seed(2))
    uniform = torch.linspace(0, 1, 100_001)
    coin = torch.tensor([0.0, 1.0]).repeat(50)
    assert kurtosis(gaussian) == pytest.approx(3, abs=0.05)
    assert kurtosis(uniform) == pytest.approx(1.8, abs=1e-3)
    assert kurtosis(coin) == pytest.approx(1)
    assert sarle_bimodality(uniform) == pytest.approx(5 / 9, abs=1e-3)
    assert sarle_bimodality(coin) == pytest.approx(1)
    assert sarle_bimodality(gaussian) == pytest.approx(1 / 3, abs=0.01)


@pytest.mark.parametrize("moment", [kurtosis, sarle_bimodality])
def test_moments_ignore_unit_and_origin_and_a_constant_has_none(moment):
    x = activations(1, 500, seed=3).exp()
    assert moment(x * 12 - 40) == pytest.approx(moment(x), rel=1e-4)
    assert moment(torch.full((7,), 0.3)) == 0.0


@pytest.mark.parametrize("shape", ["gaussian", "lognormal", "two_modes", "outliers"])
def test_moments_are_scipys(shape):
    noise = np.random.default_rng(4).normal(size=4000)
    values = {
        "gaussian": noise,
        "lognormal": np.exp(noise),
        "two_modes": np.where(np.arange(4000) % 3 == 0, noise * 0.1 - 3, noise * 0.2 + 3),
        "outliers": np.where(np.arange(4000) % 100 == 0, noise * 300, noise),
    }[shape]
    x = torch.from_numpy(values)
    assert kurtosis(x) == pytest.approx(scipy.stats.kurtosis(values, fisher=False))
    skewness = scipy.stats.skew(values)
    assert sarle_bimodality(x) == pytest.approx((skewness**2 + 1) / scipy.stats.kurtosis(values, fisher=False))
    assert (sarle_bimodality(x) > 5 / 9) == (shape == "two_modes")
