"""A policy network as if it had been trained, for tests of what it does then."""

from __future__ import annotations

import torch

from reflux.components.algorithms.policy_networks import PolicyNetwork


def say_something(network: PolicyNetwork, seed: int = 1) -> PolicyNetwork:
    """The network with values where it begins with zeros."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in (network.bias_LH, network.out_LHC, network.level_LC):
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return network
