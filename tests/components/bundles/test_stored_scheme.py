"""Bits of a checkpoint counted from its files: those of our own bundles, and of one with groups of several kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_bundle import write_tiny_bundle

from reflux.components.algorithms.effective_bits import Bits, costs_of_weights, mean_over_weights
from reflux.components.bundles.bundle import load_bundle, read_scheme
from reflux.components.bundles.stored_scheme import packed_costs, stored_weights


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"zero_points": True, "group_size": 32},
        {"weight_bits": 8, "activation_bits": 16},
        {"exceptions": ("down_proj=8", "layers.0.*.q_proj=3", "v_proj=16", "k_proj=ternary"), "zero_points": True},
    ],
)
def test_the_files_of_a_bundle_hold_what_its_scheme_costs(
    tiny_model: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    folder = write_tiny_bundle(tmp_path / "bundle", tiny_model, **options)
    model, stored = load_bundle(folder), packed_costs(folder)
    counted = costs_of_weights(model, read_scheme(folder))
    assert stored == {name: cost for name, cost in counted.items() if cost.total < 32}
    assert mean_over_weights(model, stored) == mean_over_weights(model, counted)


def test_groups_of_other_sizes_and_types_count_as_they_are(tmp_path: Path) -> None:
    """down_proj with one float32 scale a row and 3-bit codes of which ten share a word, as older files have them."""
    tensors = {
        "model.layers.0.mlp.up_proj.weight_packed": torch.zeros(16, 8, dtype=torch.int32),
        "model.layers.0.mlp.up_proj.weight_scale": torch.zeros(16, 2, dtype=torch.bfloat16),
        "model.layers.0.mlp.up_proj.weight_zero_point": torch.zeros(2, 2, dtype=torch.int32),
        "model.layers.0.mlp.up_proj.weight_shape": torch.tensor([16, 64]),
        "model.layers.0.mlp.down_proj.weight_packed": torch.zeros(64, 2, dtype=torch.int32),
        "model.layers.0.mlp.down_proj.weight_scale": torch.zeros(64, 1),
        "model.layers.0.mlp.down_proj.weight_g_idx": torch.zeros(16, dtype=torch.int32),
        "model.layers.0.mlp.down_proj.weight_shape": torch.tensor([64, 16]),
    }
    first = {name: tensor for name, tensor in tensors.items() if "up_proj" in name}
    save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    save_file({n: t for n, t in tensors.items() if n not in first}, tmp_path / "model-00002-of-00002.safetensors")
    assert packed_costs(tmp_path) == {
        "model.layers.0.mlp.up_proj": Bits(code=4, scale=16 / 32, zero_point=4 / 32),
        "model.layers.0.mlp.down_proj": Bits(code=2 * 32 / 16, scale=32 / 16 + 32 / 64),
    }


def test_a_model_in_full_precision_has_none(tiny_model: Path) -> None:
    assert stored_weights(tiny_model) is None
    with pytest.raises(ValueError, match=r"config\.json says pack-quantized, and no tensor \.weight_packed is in its"):
        packed_costs(tiny_model)
