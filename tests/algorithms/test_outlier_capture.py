"""The share of true outliers on the outlier grid, against a loop over values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from reflux.components.algorithms.low_bit import Scheme, apply_scheme, bits_of_sites, site_modules, watching_sites
from reflux.components.algorithms.outlier_capture import captured, watching_capture
from reflux.components.algorithms.policies import KNOTS, PositionTable


def in_numpy(x_D: np.ndarray, main: float, bits: int) -> float:
    """One token: its largest hundredth, and for each the nearer of the two grids, a tie being the main one's."""
    top = 2 ** (bits - 1) - 1
    outlier = max(np.abs(x_D).max() / top, main)
    largest = sorted(np.abs(x_D), reverse=True)[: int(np.ceil(len(x_D) / 100))]
    on_outlier_grid = []
    for value in largest:
        main_error = abs(value - main * min(round(value / main), top))
        outlier_error = abs(value - outlier * min(round(value / outlier), top))
        on_outlier_grid.append(outlier_error < main_error)
    return float(np.mean(on_outlier_grid))


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_by_the_formula(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    x_ND = torch.randn(40, 301, generator=generator)
    x_ND[torch.rand(40, 301, generator=generator) < 0.02] *= 9
    main_N1 = torch.rand(40, 1, generator=generator) * 6 / 2 ** (bits - 1) + 0.01
    found_N = captured(x_ND, main_N1, bits)
    expected = [in_numpy(x_D.double().numpy(), main.item(), bits) for x_D, main in zip(x_ND, main_N1, strict=True)]
    # a value between two points that are equally near may fall to either grid in float32: one of 160
    assert np.abs(found_N.numpy() - expected).sum() <= 0.25
    assert 0.1 < found_N.mean() < 1


def test_a_main_grid_that_holds_everything_catches_none_and_one_that_ends_before_them_all() -> None:
    x_ND = torch.cat([torch.linspace(-1, 1, 297), torch.tensor([20.0, 40.0, -60.0])])[None]
    assert captured(x_ND, torch.tensor([[10.0]]), 4).item() == 0
    assert captured(x_ND, torch.tensor([[1 / 7]]), 4).item() == 1


@torch.no_grad()
def test_of_a_model_the_named_tokens_count_at_every_site_that_rounds(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    sites = list(site_modules(model))
    generator = torch.Generator().manual_seed(0)
    policy = PositionTable(sites, torch.rand(len(sites), len(KNOTS), 2, generator=generator) * 0.3 + 0.05)
    scheme = Scheme(weight_bits=16, exceptions=("down_in=8", "layers.0.o_in=16"))
    apply_scheme(model, scheme, policy)
    position_BT = torch.arange(7)[None]
    entered: list[torch.Tensor] = []
    rows_N, columns_N = [0, 1, 1], [6, 0, 3]
    bits = bits_of_sites(model, scheme)
    with (
        watching_sites(model, lambda site, x_BTD: entered.append(x_BTD)),
        watching_capture(model, bits, rows_N, columns_N) as found,
    ):
        model(input_ids=torch.arange(14).reshape(2, 7) + 5, position_ids=position_BT)
    order = ["attn_in", "o_in", "mlp_in", "down_in"]
    expected = []
    for place, x_BTD in enumerate(entered):
        site = f"layers.{place // 4}.{order[place % 4]}"
        if bits[site] < 16:
            scale_T = policy.main_scales(position_BT)[policy.index[site], 0]
            expected.append(captured(x_BTD[rows_N, columns_N], scale_T[columns_N][:, None], bits[site]))
    assert len(found) == len(expected) == 7
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
