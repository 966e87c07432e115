"""The head's product against torch's own, forward and backward."""

from __future__ import annotations

import pytest
import torch

from reflux.components.algorithms.wide_product import wide_product


@pytest.mark.parametrize(("rows", "inputs", "words"), [(0, 8, 40), (1, 1, 1), (1, 7, 33), (33, 64, 1001)])
@pytest.mark.parametrize("trained", ["hidden", "weight", "both"])
def test_equals_linear_in_value_and_gradient(rows: int, inputs: int, words: int, trained: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x_NI = torch.randn(rows, inputs, generator=generator).requires_grad_(trained != "weight")
    weight_PI = torch.randn(words, inputs, generator=generator).requires_grad_(trained != "hidden")
    upstream_NP = torch.randn(rows, words, generator=generator)
    leaves = [leaf for leaf in (x_NI, weight_PI) if leaf.requires_grad]
    found, expected = (
        (product_NP, *torch.autograd.grad(product_NP, leaves, upstream_NP))
        for product_NP in (wide_product(x_NI, weight_PI), torch.nn.functional.linear(x_NI, weight_PI))
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


def test_other_types_are_torch_s_own() -> None:
    x_NI, weight_PI = torch.randn(3, 5, dtype=torch.float64), torch.randn(9, 5, dtype=torch.float64)
    assert torch.equal(wide_product(x_NI, weight_PI), torch.nn.functional.linear(x_NI, weight_PI))
