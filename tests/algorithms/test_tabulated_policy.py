"""A policy network becomes a table: its averages against loops over tokens, and what is refused."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trained_network import say_something
from transformers import AutoModelForCausalLM

from reflux.components.algorithms.low_bit import Scheme, apply_scheme, site_modules
from reflux.components.algorithms.policies import PositionTable
from reflux.components.algorithms.policy_networks import LARGEST_CORRECTION, attach
from reflux.components.algorithms.tabulated_policy import corrections
from reflux.components.sequences import padded

KNOTS = (0, 1, 4, 16, 64)
SEQUENCES = [[*range(10, 31)], [*range(40, 45)], [*range(50, 62)]]


@pytest.fixture
def model(tiny_model: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval().requires_grad_(False)
    sites = list(site_modules(model))
    scales = torch.rand(len(sites), len(KNOTS), 2, generator=torch.Generator().manual_seed(0)) * 0.1 + 0.1
    apply_scheme(model, Scheme(weight_bits=16), PositionTable(sites, scales, KNOTS))
    attach(model, "mlp")
    return model


@torch.no_grad()
def test_corrections_are_means_over_the_tokens_nearest_to_each_knot(model: Any) -> None:
    say_something(model.policy_network)
    by_place: dict[tuple[int, int], list[float]] = defaultdict(list)
    for ids in SEQUENCES:
        position_BT = torch.arange(len(ids))[None]
        model(input_ids=torch.tensor([ids]), position_ids=position_BT, use_cache=False)
        plain_SBT = model.policy.main_scales(position_BT)
        for at in range(len(model.policy.sites)):
            for t in range(len(ids)):
                knot = min(range(len(KNOTS)), key=lambda p: abs(KNOTS[p] - t))
                ratio = model.model.main_scales[at].double()[0, t] / plain_SBT[at].double()[0, t]
                by_place[at, knot].append(float(ratio.log()))
    found = corrections(model, [padded(SEQUENCES, 0)])
    for (at, knot), values in by_place.items():
        assert found.mean_SP[at, knot].item() == pytest.approx(np.mean(values), abs=1e-6)
    apart = [value - np.mean(values) for values in by_place.values() for value in values]
    assert found.unexplained_nats == pytest.approx(np.sqrt(np.mean(np.square(apart))), rel=1e-4)
    assert found.unexplained_nats > 0.01
    assert torch.equal(found.mean_SP[:, -1], found.mean_SP[:, -2])  # no token is nearest to position 64
    assert not found.mean_SP[:4].any()  # nothing is read before the first layer
    assert found.mean_SP[4:].all()


@torch.no_grad()
def test_what_is_the_same_at_every_token_is_all_in_the_table(model: Any) -> None:
    levels = torch.tensor([0.1, -0.2, 0.3, -0.4])
    model.policy_network.level_LC.copy_(levels[None])
    found = corrections(model, [padded(SEQUENCES[:2], 0), padded(SEQUENCES[2:], 0)])
    expected_S = LARGEST_CORRECTION * (levels / LARGEST_CORRECTION).tanh()
    torch.testing.assert_close(found.mean_SP[4:], expected_S[:, None].expand(4, len(KNOTS)), rtol=0, atol=1e-6)
    assert found.unexplained_nats < 1e-6


def test_a_network_that_has_learned_nothing_makes_no_table(model: Any) -> None:
    with pytest.raises(ValueError, match="policy network: has learned nothing yet"):
        corrections(model, [padded(SEQUENCES, 0)])
