"""The largest attention weight against the map that eager attention returns, and a model that is left as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from reflux.components import models
from reflux.components.algorithms.attention_rows import CHUNK_ROWS, largest_weights
from reflux.components.algorithms.attention_watch import intercepted_attention, require_plain


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    return models.load_model(tiny_model)


def padded_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Two sequences, longer than one block of rows, the second padded on the right."""
    input_BT = torch.randint(3, 250, (2, CHUNK_ROWS + 9), generator=torch.Generator().manual_seed(0))
    return input_BT, (torch.arange(CHUNK_ROWS + 9) < torch.tensor([[CHUNK_ROWS + 9], [21]])).long()


def watched(model: Any, **inputs: Any) -> tuple[Any, list[torch.Tensor]]:
    peaks = []

    def intercept(attend, module, query, key, value, mask, **options):
        peaks.append(largest_weights(query, key, mask, options["scaling"]))
        return attend(module, query, key, value, mask, **options)

    with torch.no_grad(), intercepted_attention(model, intercept):
        output = model(**inputs)
    return output, peaks


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("padding", [True, False])
def test_they_are_the_largest_of_the_eager_map(model: Any, implementation: str, padding: bool) -> None:
    input_BT, mask_BT = padded_batch()
    inputs = {"input_ids": input_BT, "attention_mask": mask_BT if padding else None}
    try:
        model.set_attn_implementation("eager")
        with torch.no_grad():
            maps = model(**inputs, output_attentions=True).attentions
        model.set_attn_implementation(implementation)
        _, peaks = watched(model, **inputs)
    finally:
        model.set_attn_implementation("sdpa")
    assert len(peaks) == len(maps) == 2
    for peak_BHT, map_BHTT in zip(peaks, maps, strict=True):
        valid_B1T = (mask_BT.bool() if padding else mask_BT >= 0)[:, None]
        ours, theirs = (of_BHT.masked_fill(~valid_B1T, 0) for of_BHT in (peak_BHT, map_BHTT.amax(-1)))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_what_the_model_says_is_the_same_and_it_is_left_as_it_was(model: Any) -> None:
    input_BT, mask_BT = padded_batch()
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with torch.no_grad():
        plain = model(input_ids=input_BT, attention_mask=mask_BT)
    seen, _ = watched(model, input_ids=input_BT, attention_mask=mask_BT)
    assert torch.equal(seen.logits, plain.logits)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"), intercepted_attention(model, broken):
        model(input_ids=input_BT)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before
    assert "eager" not in ALL_ATTENTION_FUNCTIONS


def test_one_interception_within_another_sees_each_call_once(model: Any) -> None:
    calls: list[str] = []

    def named(name: str) -> Any:
        def intercept(attend, *args, **options):
            calls.append(name)
            return attend(*args, **options)

        return intercept

    with intercepted_attention(model, named("outer")), intercepted_attention(model, named("inner")):
        model(input_ids=torch.tensor([[5, 6]]))
    assert calls == ["inner", "outer"] * 2


def test_an_additive_mask_and_a_decoded_token() -> None:
    """One query at the end of five keys, of which the mask hides the best."""
    query = torch.tensor([1.0, 0.0]).reshape(1, 1, 1, 2)
    key = torch.tensor([[9.0, 0.0], [1.0, 0.0], [0.0, 3.0], [2.0, 0.0], [0.0, 0.0]]).reshape(1, 1, 5, 2)
    hidden = torch.zeros(1, 1, 1, 5).index_fill_(-1, torch.tensor([0]), -torch.inf)
    expected = torch.tensor([1.0, 0.0, 2.0, 0.0]).softmax(0).max()
    torch.testing.assert_close(largest_weights(query, key, hidden, 1.0).squeeze(), expected)
    seen = torch.tensor([9.0, 1.0, 0.0, 2.0, 0.0]).softmax(0).max()
    torch.testing.assert_close(largest_weights(query, key, None, 1.0).squeeze(), seen)


def test_attention_that_does_more_is_refused(model: Any) -> None:
    require_plain(model, {"softcap": None, "scaling": 0.1})
    with pytest.raises(ValueError, match="its attention uses softcap, which is not recomputed here"):
        require_plain(model, {"softcap": 30.0})
