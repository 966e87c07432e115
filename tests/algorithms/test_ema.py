"""The moving average against its recursion."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from reflux.components.algorithms.ema import Ema


def test_follows_the_recursion_from_the_weights_themselves():
    generator = torch.Generator().manual_seed(0)
    parameters = {name: nn.Parameter(torch.randn(3, generator=generator)) for name in ("a", "b")}
    ema = Ema(parameters, 0.9)
    expected = {name: p.detach().clone() for name, p in parameters.items()}
    for _ in range(20):
        with torch.no_grad():
            for name, p in parameters.items():
                p.add_(torch.randn(3, generator=generator))
                expected[name] = 0.9 * expected[name] + 0.1 * p
        ema.update(parameters)
    for name in parameters:
        torch.testing.assert_close(ema.average[name], expected[name])
    target = {name: nn.Parameter(torch.zeros(3)) for name in parameters}
    ema.copy_to(target)
    assert all(torch.equal(target[name], ema.average[name]) for name in parameters)
    assert all(target[name].requires_grad for name in parameters)


def test_the_average_is_no_alias_of_the_weights():
    parameter = nn.Parameter(torch.ones(2))
    ema = Ema({"a": parameter}, 0.5)
    with torch.no_grad():
        parameter.zero_()
    assert (ema.average["a"] == 1).all()


def test_no_decay_keeps_the_last_weights():
    parameter = nn.Parameter(torch.ones(2))
    ema = Ema({"a": parameter}, 0.0)
    with torch.no_grad():
        parameter.fill_(5.0)
    ema.update({"a": parameter})
    ema.copy_to({"a": parameter})
    assert (parameter == 5).all()


@pytest.mark.parametrize("decay", [-0.1, 1.0, 2.0, float("nan")])
def test_an_impossible_decay_is_refused(decay: float):
    with pytest.raises(ValueError, match="ema_decay"):
        Ema({}, decay)
