"""Policies that read: against numpy, token by token against whole sequences, and what they may not see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trained_network import say_something
from transformers import AutoModelForCausalLM, DynamicCache

from reflux.components.algorithms.draws import Sampling
from reflux.components.algorithms.low_bit import Scheme, apply_scheme, decoder_layers, site_modules
from reflux.components.algorithms.policies import KNOTS, PositionTable
from reflux.components.algorithms.policy_networks import (
    BUDGET,
    LARGEST_CORRECTION,
    POOLS,
    PolicyNetwork,
    attach,
    same_sequence_so_far,
)
from reflux.components.algorithms.recomputation import recompute_layers
from reflux.components.algorithms.rollouts import Request, rollout
from reflux.components.algorithms.slot_cache import SlotCache, cache_argument

KINDS = sorted(POOLS)


@pytest.fixture
def model(tiny_model: Path) -> Any:
    """Activations of 8 bits, weights as they are: little enough rounding to compare logits."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval().requires_grad_(False)
    sites = list(site_modules(model))
    scales = torch.rand(len(sites), len(KNOTS), 2, generator=torch.Generator().manual_seed(0)) * 0.01 + 0.01
    return apply_scheme(model, Scheme(weight_bits=16, activation_bits=8), PositionTable(sites, scales))


def trained(kind: str, channels: int = 6, layers: int = 3) -> PolicyNetwork:
    return say_something(PolicyNetwork(kind, channels, layers, seed=0))


def activations(*shape: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def whole(position_BT: torch.Tensor) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    return lambda kept_BTE: (kept_BTE, same_sequence_so_far(position_BT))


def in_numpy(network: PolicyNetwork, x_TD: np.ndarray, layer: int) -> np.ndarray:
    """[T, C] of one sequence, in float64 and one token at a time."""
    read, bias, out, level = (
        p.detach().double().numpy() for p in (network.read_DE, network.bias_LH, network.out_LHC, network.level_LC)
    )
    unit_TD = x_TD / np.sqrt((x_TD**2).mean(-1, keepdims=True) + np.finfo(np.float32).eps)
    maps_TE, width, rows = unit_TD @ read, network.width, []
    for t in range(len(x_TD)):
        if network.kind == "mlp":
            pooled_H = maps_TE[: t + 1].mean(0)
        else:
            query_H, key_UH, value_UH = maps_TE[t, :width], maps_TE[: t + 1, width:-width], maps_TE[: t + 1, -width:]
            weight_U = np.exp(key_UH @ query_H / np.sqrt(width))
            pooled_H = weight_U @ value_UH / weight_U.sum()
        pre_H = pooled_H + bias[layer]
        raw_C = pre_H / (1 + np.exp(-pre_H)) @ out[layer] + level[layer]
        rows.append(np.log(8) * np.tanh(raw_C / np.log(8)))
    return np.stack(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_corrections_are_those_of_the_formula_also_where_rows_hold_several_sequences(kind: str) -> None:
    network, x_BTD = trained(kind), activations(2, 9, 6)
    position_BT = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
    for layer in range(2):
        found_BTC = network(x_BTD, layer, whole(position_BT)).detach().numpy()
        x = x_BTD.double().numpy()
        for row, begin, end in ((0, 0, 4), (0, 4, 6), (0, 6, 9), (1, 0, 9)):
            expected_TC = in_numpy(network, x[row, begin:end], layer)
            np.testing.assert_allclose(found_BTC[row, begin:end], expected_TC, rtol=0, atol=1e-5)
    assert np.abs(found_BTC).max() < LARGEST_CORRECTION
    assert found_BTC.std() > 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_no_later_token_is_seen(kind: str) -> None:
    network, x_BTD, position_BT = trained(kind), activations(1, 8, 6), torch.arange(8)[None]
    changed_BTD = x_BTD.clone()
    changed_BTD[:, 5:] *= -3
    before, after = (network(x, 0, whole(position_BT)) for x in (x_BTD, changed_BTD))
    assert torch.equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_token_by_token_is_the_whole_sequence(kind: str) -> None:
    """Two sequences of different length side by side; in the end one is copied into another slot and goes on there."""
    network, x_BTD = trained(kind), activations(2, 8, 6)
    expected_BTC = network(x_BTD, 1, whole(torch.arange(8)[None]))
    cache = SlotCache(layers=0, slots=3, capacity=8)
    lengths = [4, 2]
    cache.fill([0, 1], lengths, torch.device("cpu"))
    network(x_BTD[:, :4], 1, lambda kept: (cache.remember(1, kept), same_sequence_so_far(torch.arange(4)[None])))

    def step(tokens_B1D: torch.Tensor, position_B: torch.Tensor) -> torch.Tensor:
        longest = int(position_B.max())
        cache.decode(position_B, longest)
        so_far = torch.arange(longest + 1) <= position_B[:, None, None]
        return network(tokens_B1D, 1, lambda kept: (cache.remember(1, kept), so_far))[:, 0]

    for ahead in range(4):
        position_B = torch.tensor(lengths) + ahead
        found_BC = step(x_BTD[[0, 1], position_B][:, None], position_B)
        torch.testing.assert_close(found_BC, expected_BTC[[0, 1], position_B], rtol=0, atol=1e-6)
    cache.copy(1, 0, 6)
    torch.testing.assert_close(step(x_BTD[1:, 6:7], torch.tensor([6]))[0], expected_BTC[1, 6], rtol=0, atol=1e-6)


def inputs(rows: int = 2, tokens: int = 9) -> dict[str, Any]:
    input_BT = torch.randint(3, 259, (rows, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": input_BT, "position_ids": torch.arange(tokens)[None], "use_cache": False}


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_begins_as_with_its_table_alone_and_ends_so(kind: str, model: Any) -> None:
    before = model(**inputs()).logits
    attach(model, kind)
    assert torch.equal(model(**inputs()).logits, before)
    say_something(model.policy_network)
    assert not torch.allclose(model(**inputs()).logits, before, atol=1e-4)
    model.policy_network = None
    assert torch.equal(model(**inputs()).logits, before)
    assert not [name for name, _ in model.named_parameters() if "policy_network" in name]


@torch.no_grad()
def test_the_next_block_rounds_by_what_this_one_saw(model: Any) -> None:
    """A network that knows only levels multiplies the second layer's four scales by them, and no others."""
    attach(model, "mlp")
    levels = torch.tensor([0.1, -0.2, 0.3, -0.4])
    model.policy_network.level_LC.copy_(levels[None])
    model(**inputs())
    plain_SBT = model.policy.main_scales(inputs()["position_ids"])
    for site, at in model.policy.index.items():
        layer, name = site.split(".")[1:]
        level = levels[["attn_in", "o_in", "mlp_in", "down_in"].index(name)] if layer == "1" else torch.tensor(0.0)
        expected = plain_SBT[at] * (LARGEST_CORRECTION * (level / LARGEST_CORRECTION).tanh()).exp()
        torch.testing.assert_close(model.model.main_scales[at].expand(2, 9), expected.expand(2, 9))


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_rollouts_see_the_logits_of_whole_sequences(kind: str, model: Any) -> None:
    """Slots are fewer than requests, so that sequences move; one prompt is there twice, and is copied."""
    attach(model, kind)
    say_something(model.policy_network)
    prompts = [[5, 6, 7, 8, 9, 10], [20], [5, 6, 7, 8, 9, 10], [30, 31, 32]]
    seen: dict[int, list[torch.Tensor]] = {row: [] for row in range(4)}

    def keep(rows: list[int], logits_BV: torch.Tensor) -> None:
        for row, logits_V in zip(rows, logits_BV, strict=True):
            seen[row].append(logits_V)

    answers = rollout(
        model,
        [Request(prompt_token_ids=prompt, seed=row) for row, prompt in enumerate(prompts)],
        Sampling(temperature=1.0, max_new_tokens=7),
        eos_token_id=2,
        vocab_size=259,
        slots=3,
        on_step=keep,
    )
    for row, answer in enumerate(answers):
        ids = answer.prompt_token_ids + answer.response_token_ids
        logits_TV = model(
            input_ids=torch.tensor([ids]), position_ids=torch.arange(len(ids))[None], use_cache=False
        ).logits[0, len(answer.prompt_token_ids) - 1 : -1, :259]
        # the sums run in another order, and a value beside the middle of two codes may cross it
        assert (torch.stack(seen[row]) - logits_TV).abs().mean() < 2e-3 * logits_TV.abs().mean()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_every_part_and_recomputed_layers_change_none(kind: str, model: Any) -> None:
    """Two forwards of different length come before their gradients."""
    found = []
    attach(model, kind)
    say_something(model.policy_network)
    forwards = [layer.forward for layer in decoder_layers(model)]
    for mode in ("none", "selective", "full"):
        for layer, forward in zip(decoder_layers(model), forwards, strict=True):
            layer.forward = forward
        recompute_layers(model, mode)
        sum(model(**inputs(tokens=tokens)).logits.logsumexp(-1).sum() for tokens in (9, 6)).backward()
        found.append({name: p.grad.clone() for name, p in model.policy_network.named_parameters()})
        model.zero_grad(set_to_none=True)
    assert all(grad.any() for grad in found[0].values())
    for again in found[1:]:
        assert all(torch.equal(found[0][name], grad) for name, grad in again.items())


@pytest.mark.parametrize(("channels", "layers"), [(64, 2), (576, 30), (4096, 32), (16384, 126)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_network_is_larger_than_the_budget(kind: str, channels: int, layers: int) -> None:
    network = PolicyNetwork(kind, channels, layers, seed=0)
    assert sum(p.numel() for p in network.parameters()) <= BUDGET
    assert network.width == 64 or sum(p.numel() for p in network.parameters()) > 0.8 * BUDGET


def test_a_seed_gives_the_same_network() -> None:
    first, again, other = (PolicyNetwork("mlp", 8, 2, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.read_DE, again.read_DE)
    assert not torch.equal(first.read_DE, other.read_DE)


@pytest.mark.parametrize(
    ("kind", "channels", "layers", "message"),
    [
        ("lookup", 8, 2, "policy 'lookup': allowed are mlp, attention"),
        ("mlp", 8, 1, "policy 'mlp': reads a layer for the next one, and the model has 1"),
        ("attention", 200_000, 2, "policy 'attention': 200000 channels and 2 layers take more than 300000 parameters"),
    ],
)
def test_a_network_that_cannot_be(kind: str, channels: int, layers: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyNetwork(kind, channels, layers, seed=0)


def test_a_model_without_a_table_takes_no_network(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    apply_scheme(model, Scheme(activation="plain"))
    with pytest.raises(ValueError, match="policy 'mlp': corrects a position table, and the model rounds without one"):
        attach(model, "mlp")
    assert len(decoder_layers(model)) == 2


@torch.no_grad()
def test_another_cache_would_forget_what_the_network_has_read(model: Any) -> None:
    attach(model, "mlp")
    with pytest.raises(ValueError, match="a generation needs a SlotCache from its first token on"):
        model(**inputs() | {"use_cache": True})
    with pytest.raises(ValueError, match="in a SlotCache, not in a DynamicCache"):
        model(**inputs(), **{cache_argument(model): DynamicCache()})
