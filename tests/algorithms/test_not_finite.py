"""The first module, sequence and position of a number that is not finite; and no word where all is well."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from reflux.components.algorithms.not_finite import Place, first_not_finite, require_finite
from reflux.components.algorithms.output_head import final_hidden_states
from reflux.components.models import load_model
from reflux.components.sequences import padded

POISON = 77
"""A token id."""


@pytest.fixture
def model(tiny_model: Path) -> Any:
    return load_model(tiny_model)


def forward_of(model: Any, sequences: list[list[int]]) -> tuple[Any, torch.Tensor]:
    input_BT, mask_BT, position_BT = padded(sequences, POISON)  # what pads is worse than what is read
    return partial(final_hidden_states, model, input_BT, mask_BT, position_BT), mask_BT


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_the_token_that_brought_it_in_is_named(model: Any, bad: float) -> None:
    model.model.embed_tokens.weight[POISON, 9] = bad
    forward, mask_BT = forward_of(model, [[5, 6, 7], [5, 6, 7, 8, POISON, 9]])
    assert first_not_finite(model, forward, mask_BT) == Place(module="model.embed_tokens", sequence=1, position=4)
    hidden_BTD = forward()
    with pytest.raises(ValueError, match=r"stage: the output of model\.embed_tokens is .* at position 4 of trace b"):
        require_finite(hidden_BTD[mask_BT.bool()], "stage", ["trace a", "trace b"], model, forward, mask_BT)


def test_what_stands_in_padding_does_not_count(model: Any) -> None:
    def spoil(module: Any, args: tuple, output_BTD: torch.Tensor) -> torch.Tensor:
        return output_BTD.masked_fill(~mask_BT.bool()[..., None], torch.nan)

    forward, mask_BT = forward_of(model, [[5, 6, 7], [5, 6, 7, 8, 10, 9]])
    model.model.layers[1].mlp.register_forward_hook(spoil)  # behind the last attention, which would spread it
    assert not forward().isfinite().all()
    assert first_not_finite(model, forward, mask_BT) is None
    require_finite(forward()[mask_BT.bool()], "stage", ["a", "b"], model, forward, mask_BT)


def test_the_module_that_made_it_is_named(model: Any) -> None:
    model.model.layers[1].self_attn.v_proj.weight[3, 5] = torch.inf
    forward, _ = forward_of(model, [[5, 6, 7, 8]])
    assert first_not_finite(model, forward) == Place(module="model.layers.1.self_attn.v_proj", sequence=0, position=0)


def test_a_result_that_is_not_finite_without_an_activation(model: Any) -> None:
    forward, _ = forward_of(model, [[5, 6, 7, 8]])
    with pytest.raises(ValueError, match="stage: results for trace a are not finite, though all activations are"):
        require_finite(torch.tensor([torch.nan]), "stage", ["trace a"], model, forward)
    require_finite(forward(), "stage", ["trace a"], model, forward)
