"""How far the position table is from the scale of every single position, on the tiny model's own activations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from reflux.components.algorithms.low_bit import site_modules, watching_sites
from reflux.components.algorithms.policies import KNOTS, interpolation_error, knots_of
from reflux.components.models import load_model
from reflux.components.profile_kv.activations import ActivationWatch, position_table

SEQUENCES, TOKENS = 512, 64


@pytest.fixture(scope="module")
def scales(tiny_model: Path) -> torch.Tensor:
    """Root mean square at each site and position. Attention of random weights is a mean over all tokens so far, so that
    o_in falls with the position as steeply as any site of a real model does.
    """
    model = load_model(tiny_model)
    sites = list(site_modules(model))
    square_ST = torch.zeros(len(sites), TOKENS, dtype=torch.float64)

    def see(site: str, x_BTD: torch.Tensor) -> None:
        square_ST[sites.index(site)] += x_BTD.double().square().mean(-1).sum(0)

    input_BT = torch.randint(3, 259, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), watching_sites(model, see):
        for part_BT in input_BT.split(128):
            model.model(part_BT, position_ids=torch.arange(TOKENS)[None], use_cache=False)
    return (square_ST / SEQUENCES).sqrt()


def test_four_rows_for_each_doubling_are_within_half_a_percent(scales: torch.Tensor) -> None:
    assert interpolation_error(scales, knots_of(4)).mean() < 0.005
    by_rows = [interpolation_error(scales, knots_of(n)).mean().item() for n in (1, 2, 4)]
    assert by_rows == sorted(by_rows, reverse=True)


def test_where_scales_do_not_fall_with_the_position_the_default_rows_are(scales: torch.Tensor) -> None:
    of_norms = [0, 2, 4, 6]  # attn_in and mlp_in of both layers
    assert interpolation_error(scales[of_norms], KNOTS).max() < 0.005


def test_a_table_of_more_rows_is_made_of_the_tokens_nearest_to_each() -> None:
    """Scales that double at position 6, which no default row stands at."""
    x_BTD = torch.ones(2, 12, 40)
    x_BTD[:, 6:] = 2
    watch = ActivationWatch(1000, 2, seed=0, knots=knots_of(4))
    watch.begin(torch.ones(2, 12, dtype=torch.int64))
    watch.see("layers.0.attn_in", x_BTD)
    table = position_table(watch, ["layers.0.attn_in"], 4)
    assert table.knots[:9] == (0, 1, 2, 3, 4, 5, 6, 7, 8)
    scale_T = table.main_scales(torch.arange(12)[None])[0, 0]
    torch.testing.assert_close(scale_T, torch.tensor([1 / 7] * 6 + [2 / 7] * 6))
