"""Finer steps where keys are long, against numpy, and the limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reflux.components.algorithms.k_norm_steps import FINEST, finer_where_keys_are_long
from reflux.components.algorithms.policies import PositionTable

KNOTS = (0, 1, 4, 16)
SITES = [f"layers.{layer}.{name}" for layer in range(2) for name in ("attn_in", "o_in", "mlp_in", "down_in")]
TABLE = PositionTable(SITES, torch.rand(8, 4, 2, generator=torch.Generator().manual_seed(0)) + 0.1, KNOTS)
NORM_LT = torch.rand(2, 9, generator=torch.Generator().manual_seed(1)) * 10 + 5
SEQUENCES_T = torch.tensor([4, 4, 4, 3, 3, 2, 2, 1, 0])


def in_numpy(power: float) -> np.ndarray:
    """[L, P] factors."""
    factors = np.empty((2, len(KNOTS)))
    norms, counts = NORM_LT.double().numpy(), SEQUENCES_T.numpy()
    for layer in range(2):
        typical = sorted(norms[layer, counts > 0])[(int((counts > 0).sum()) - 1) // 2]
        for p in range(len(KNOTS)):
            near = [t for t in range(9) if counts[t] and min(range(4), key=lambda q: abs(KNOTS[q] - t)) == p]
            if not near:
                factors[layer, p] = factors[layer, p - 1]
                continue
            norm = sum(norms[layer, t] * counts[t] for t in near) / sum(counts[t] for t in near)
            factors[layer, p] = min(1.0, max(FINEST, (norm / typical) ** -power))
    return factors


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_by_the_formula_at_the_sites_around_attention_alone(power: float) -> None:
    scales_SP2 = finer_where_keys_are_long(TABLE, NORM_LT, SEQUENCES_T, power).scales()
    expected_LP = in_numpy(power)
    for at, site in enumerate(SITES):
        _, layer, name = site.split(".")
        factor_P = expected_LP[int(layer)] if name in ("attn_in", "o_in") else np.ones(4)
        expected_P = TABLE.scales()[at, :, 0] * torch.from_numpy(factor_P).float()
        torch.testing.assert_close(scales_SP2[at, :, 0], expected_P)
        assert torch.equal(scales_SP2[at, :, 1], TABLE.scales()[at, :, 1])
    assert (expected_LP < 1).any()


def test_no_step_becomes_coarser_or_finer_than_a_quarter() -> None:
    norm_LT = torch.ones(2, 9)
    norm_LT[0, 0], norm_LT[1, 0] = 1000.0, 0.001
    scales_SP2 = finer_where_keys_are_long(TABLE, norm_LT, torch.ones(9), 1.0).scales()
    ratio_SP = (scales_SP2 / TABLE.scales())[..., 0]
    assert ratio_SP[:2, 0].tolist() == pytest.approx([FINEST] * 2)
    assert ratio_SP[4:6, 0].tolist() == pytest.approx([1, 1])
    assert ratio_SP[:, 1:].flatten().tolist() == pytest.approx([1] * 24)


def test_where_all_keys_are_equally_long_nothing_changes() -> None:
    same = finer_where_keys_are_long(TABLE, torch.full((2, 9), 3.0), torch.ones(9), 2.0)
    torch.testing.assert_close(same.scales(), TABLE.scales())
