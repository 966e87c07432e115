"""The low-bit forward on the tiny model against the same model with its weights and activations rounded by hand."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from reflux.components.algorithms.low_bit import (
    SITES,
    LowBitLinear,
    Scheme,
    apply_scheme,
    bits_of_sites,
    bits_of_weights,
    decoder_layers,
    frozen_weights,
    full_precision_activations,
    site_modules,
    watching_sites,
)
from reflux.components.algorithms.policies import KNOTS, PositionTable
from reflux.components.algorithms.quantizers import plain, weight_codes, weight_values

WEIGHTS_ONLY = Scheme(activation_bits=16, group_size=32)


@pytest.fixture
def model(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def table(model: Any, scale: float = 0.2) -> PositionTable:
    """Scales that differ by site and by position."""
    sites = list(site_modules(model))
    scales = torch.rand(len(sites), len(KNOTS), 2, generator=torch.Generator().manual_seed(0)) * scale + scale
    return PositionTable(sites, scales)


def batch(rows: int = 2, tokens: int = 9) -> dict[str, torch.Tensor]:
    input_BT = torch.randint(3, 259, (rows, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": input_BT, "position_ids": torch.arange(tokens).expand(rows, tokens)}


@contextmanager
def rounding_inputs(model: Any, rounding: Any) -> Iterator[None]:
    """Each site's input goes through `rounding(site, x)`: the scheme's activations, written a second time."""

    def hook(site: str) -> Any:
        def before(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            if "hidden_states" in kwargs:
                return args, {**kwargs, "hidden_states": rounding(site, kwargs["hidden_states"])}
            return (rounding(site, args[0]), *args[1:]), kwargs

        return before

    handles = [
        module.register_forward_pre_hook(hook(site), with_kwargs=True) for site, module in site_modules(model).items()
    ]
    yield
    for handle in handles:
        handle.remove()


def test_digest_tells_schemes_apart_and_nothing_else():
    assert Scheme().digest() == Scheme(weight_bits=4, group_size=64, activation_bits=4, activation="dual").digest()
    different = [Scheme(), Scheme(weight_bits=3), Scheme(group_size=32), Scheme(activation_bits=8)]
    different += [Scheme(activation="plain"), Scheme(exceptions=("down_in=8",)), Scheme(exceptions=("down_proj=8",))]
    assert len({scheme.digest() for scheme in different}) == 7
    assert all(Scheme.from_json(json.loads(json.dumps(scheme.as_json()))) == scheme for scheme in different)


def test_a_scheme_without_exceptions_has_the_digest_that_it_had_before_there_were_any():
    fields = '{"activation": "dual", "activation_bits": 4, "group_size": 64, "weight_bits": 4}'
    assert Scheme().digest() == hashlib.sha256(fields.encode()).hexdigest()


def test_weights_alone_is_a_scheme_without_rounded_activations(model: Any):
    mixed = Scheme(exceptions=("down_*=8", "layers.0.*=3")).weights_only()
    assert set(bits_of_sites(model, mixed).values()) == {16}
    assert sorted(set(bits_of_weights(model, mixed).values())) == [3, 4, 8]
    assert Scheme().weights_only() == Scheme(activation_bits=16)


@torch.no_grad()
def test_exceptions_change_the_layers_and_sites_that_they_name_alone(model: Any, tiny_model: Path):
    by_hand = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    for name, module in by_hand.model.layers.named_modules():
        if isinstance(module, nn.Linear) and name != "1.mlp.up_proj":
            module.weight.copy_(weight_values(*weight_codes(module.weight, 8 if "down" in name else 4, 32)))

    def rounding(site: str, x_BTD: torch.Tensor) -> torch.Tensor:
        return x_BTD if site == "layers.0.o_in" else plain(x_BTD, None, 8 if site.endswith("down_in") else 4)

    with rounding_inputs(by_hand, rounding):
        expected = by_hand(**batch()).logits
    exceptions = ("down_proj=8", "down_in=8", "layers.0.o_in=16", "layers.1.mlp.up_proj=16")
    apply_scheme(model, Scheme(group_size=32, activation="plain", exceptions=exceptions))
    assert torch.equal(model(**batch()).logits, expected)


def test_an_exception_for_no_layer_is_refused_before_anything_changes(model: Any):
    linears = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match="exceptions 'down=8': fits no layer"):
        apply_scheme(model, Scheme(activation_bits=16, exceptions=("down=8",)))
    assert [type(m) for m in model.modules()] == linears


@pytest.mark.parametrize(
    ("field", "value"),
    [("weight_bits", 1), ("weight_bits", 9), ("activation_bits", 32), ("group_size", 0), ("activation", "triple")],
)
def test_an_impossible_scheme_is_refused_by_name(field: str, value: object):
    with pytest.raises(ValueError, match=f"{field} {value!r}"):
        Scheme(**{field: value})


@torch.no_grad()
def test_weights_alone_equal_weights_rounded_by_hand(model: Any, tiny_model: Path):
    by_hand = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    rounded = 0
    for layer in by_hand.model.layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(weight_values(*weight_codes(module.weight, 4, 32)))
                rounded += 1
    assert rounded == 2 * 7
    before = model(**batch()).logits
    apply_scheme(model, WEIGHTS_ONLY)
    assert sum(isinstance(m, LowBitLinear) for m in model.modules()) == rounded
    assert torch.equal(model(**batch()).logits, by_hand(**batch()).logits)
    assert not torch.allclose(model(**batch()).logits, before, atol=1e-3)


@torch.no_grad()
def test_a_scheme_that_rounds_nothing_changes_nothing(model: Any):
    before = model(**batch()).logits
    apply_scheme(model, Scheme(weight_bits=16, activation_bits=16))
    assert torch.equal(model(**batch()).logits, before)


@torch.no_grad()
def test_embedding_norms_and_head_stay_as_they_are(model: Any):
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    apply_scheme(model, WEIGHTS_ONLY)
    assert model.get_output_embeddings() is head
    assert model.get_input_embeddings() is embedding
    assert not isinstance(head, LowBitLinear)


@torch.no_grad()
@pytest.mark.parametrize("activation", ["plain", "dual"])
def test_activations_are_rounded_at_the_four_sites_by_the_scale_of_their_position(model: Any, activation: str):
    policy = table(model)
    inputs = batch()

    def rounding(site: str, x_BTD: torch.Tensor) -> torch.Tensor:
        if activation == "plain":
            return plain(x_BTD, None, 4)
        rounded_BTD = torch.empty_like(x_BTD)
        for t in range(x_BTD.shape[1]):  # one token at a time: no grid sees another position
            main = policy.main_scales(torch.tensor([[t]]))[policy.index[site]].item()
            for b in range(len(x_BTD)):
                codes = torch.arange(-7, 8)
                points_P = torch.cat([codes * main, codes * max(x_BTD[b, t].abs().max().item() / 7, main)])
                rounded_BTD[b, t] = points_P[(x_BTD[b, t, :, None] - points_P).abs().argmin(-1)]
        return rounded_BTD

    with rounding_inputs(model, rounding):
        expected = model(**inputs).logits
    scheme = Scheme(weight_bits=16, activation=activation)
    apply_scheme(model, scheme, policy if activation == "dual" else None)
    torch.testing.assert_close(model(**inputs).logits, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_position_ids_are_required_and_matter(model: Any):
    apply_scheme(model, Scheme(group_size=32), table(model))
    inputs = batch()
    with pytest.raises(ValueError, match="needs position_ids"):
        model.model(inputs["input_ids"])
    one_row = model(input_ids=inputs["input_ids"], position_ids=torch.arange(9)[None]).logits
    assert torch.equal(one_row, model(**inputs).logits)  # one row of positions serves all sequences
    later = model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"] + 64).logits
    # rotary embeddings see only differences: what changes is the scales
    assert not torch.allclose(later, one_row, atol=1e-3)


@torch.no_grad()
def test_left_padding_with_explicit_positions_changes_nothing(model: Any):
    apply_scheme(model, Scheme(group_size=32), table(model))
    rows = [list(range(20, 29)), list(range(40, 44)), [7]]
    longest = max(map(len, rows))
    input_BT = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask_BT = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    position_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
    together = model(input_ids=input_BT, attention_mask=mask_BT, position_ids=position_BT).logits
    for b, row in enumerate(rows):
        alone = model(input_ids=torch.tensor([row]), position_ids=torch.arange(len(row))[None]).logits[0]
        # the sums run in another order, and a value beside the middle of two codes may cross it
        difference_TP = (together[b, longest - len(row) :] - alone).abs()
        assert difference_TP.mean() < 1e-3 * alone.abs().mean()
        assert torch.equal(together[b, -1].argmax(), alone[-1].argmax())


@torch.no_grad()
def test_a_cached_token_equals_the_whole_sequence(model: Any):
    apply_scheme(model, Scheme(group_size=32), table(model))
    inputs = batch(rows=1)
    whole = model(**inputs).logits
    first = model(input_ids=inputs["input_ids"][:, :6], position_ids=torch.arange(6)[None], use_cache=True)
    rest = model(
        input_ids=inputs["input_ids"][:, 6:],
        position_ids=torch.arange(6, 9)[None],
        past_key_values=first.past_key_values,
    )
    assert (rest.logits - whole[:, 6:]).abs().mean() < 1e-3 * whole.abs().mean()


@torch.no_grad()
def test_frozen_weights_give_equal_outputs_and_are_released(model: Any):
    apply_scheme(model, Scheme(group_size=32), table(model))
    expected = model(**batch()).logits
    with frozen_weights(model):
        assert torch.equal(model(**batch()).logits, expected)
        for parameter in decoder_layers(model).parameters():
            parameter.mul_(2.0) if parameter.ndim == 2 else None
        assert torch.equal(model(**batch()).logits, expected)
    assert not torch.allclose(model(**batch()).logits, expected)  # a later step is seen again
    with pytest.raises(KeyError), frozen_weights(model):
        raise KeyError
    assert all(m.frozen_OI is None for m in model.modules() if isinstance(m, LowBitLinear))


def test_frozen_weights_carry_the_gradients_of_all_their_forwards(model: Any):
    apply_scheme(model, Scheme(group_size=32), table(model))
    halves = [{name: value[i : i + 1] for name, value in batch(rows=2).items()} for i in range(2)]
    for half in halves:
        model(**half).logits.pow(2).mean().backward()
    expected = {name: p.grad.clone() for name, p in decoder_layers(model).named_parameters()}
    model.zero_grad()
    with frozen_weights(model, differentiable=True):
        for half in halves:
            model(**half).logits.pow(2).mean().backward()
    for name, p in decoder_layers(model).named_parameters():
        torch.testing.assert_close(p.grad, expected[name], msg=name)
    assert any(name.endswith("log_clip_OG") for name in expected)


@torch.no_grad()
def test_frozen_weights_may_be_frozen_again_inside(model: Any):
    apply_scheme(model, Scheme(group_size=32), table(model))
    with frozen_weights(model):
        outer = {layer: layer.frozen_OI for layer in model.modules() if isinstance(layer, LowBitLinear)}
        with frozen_weights(model):
            pass
        assert all(layer.frozen_OI is frozen_OI for layer, frozen_OI in outer.items())


@torch.no_grad()
def test_full_precision_activations_leave_the_weights_alone_rounded(model: Any, tiny_model: Path):
    weights_only = apply_scheme(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), WEIGHTS_ONLY)
    apply_scheme(model, Scheme(group_size=32), table(model))
    rounded = model(**batch()).logits
    with full_precision_activations(model):
        assert torch.equal(model(**batch()).logits, weights_only.eval()(**batch()).logits)
        with full_precision_activations(model):
            pass
        assert torch.equal(model(**batch()).logits, weights_only(**batch()).logits)
    assert torch.equal(model(**batch()).logits, rounded)


@torch.no_grad()
def test_watching_sees_every_site_before_rounding(model: Any, tiny_model: Path):
    original = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    apply_scheme(model, Scheme(weight_bits=16), table(model, scale=1.0))  # coarse: rounding would show
    seen: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    with watching_sites(model, lambda site, x: seen.update({site: x.clone()})):
        model(**batch())
    with watching_sites(original, lambda site, x: expected.update({site: x.clone()})):
        original(**batch())
    assert list(seen) == [f"layers.{i}.{name}" for i in range(2) for name in ("attn_in", "o_in", "mlp_in", "down_in")]
    assert {name.split(".")[-1] for name in seen} == set(SITES)
    # the first site's input is made of embeddings alone; the rounding that follows it has not touched it
    assert torch.equal(seen["layers.0.attn_in"], expected["layers.0.attn_in"])
    assert seen["layers.0.down_in"].shape == (2, 9, 128)
    seen.clear()
    model(**batch())
    assert not seen


def test_gradients_reach_master_weights_and_the_table(model: Any):
    apply_scheme(model, Scheme(group_size=32), table(model))
    model(**batch()).logits.pow(2).mean().backward()
    for name, parameter in decoder_layers(model).named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name
    touched_SP = model.policy.log_main_SP.grad != 0
    assert touched_SP[:, :5].all()  # positions 0 to 8 lie among the first five knots
    assert not touched_SP[:, 5:].any()


def test_the_table_travels_with_the_model(model: Any):
    policy = table(model)
    apply_scheme(model, Scheme(group_size=32), policy)
    assert model.policy is policy
    assert "policy.log_main_SP" in model.state_dict()


def test_a_missing_or_foreign_table_is_refused_before_anything_changes(model: Any):
    linears = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match="needs a policy table"):
        apply_scheme(model, Scheme(group_size=32))
    foreign = PositionTable(["layers.0.attn_in"], torch.ones(1, len(KNOTS), 2))
    with pytest.raises(ValueError, match=r"has no site 'layers\.0\.o_in'"):
        apply_scheme(model, Scheme(group_size=32), foreign)
    assert [type(m) for m in model.modules()] == linears


def test_a_group_that_does_not_divide_is_refused_before_anything_changes(model: Any):
    linears = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match="group_size 48: must divide the 64"):
        apply_scheme(model, Scheme(group_size=48, activation_bits=16))
    assert [type(m) for m in model.modules()] == linears


@torch.no_grad()
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_layer_whose_weights_are_not_finite_is_named_before_anything_changes(model: Any, bad: float):
    model.model.layers[1].mlp.up_proj.weight[5, 3] = bad
    linears = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj: has weights that are not finite"):
        apply_scheme(model, WEIGHTS_ONLY)
    assert [type(m) for m in model.modules()] == linears
    untouched = Scheme(activation_bits=16, group_size=32, exceptions=("layers.1.*.up_proj=16",))
    assert not isinstance(apply_scheme(model, untouched).model.layers[1].mlp.up_proj, LowBitLinear)


@torch.no_grad()
def test_one_group_may_be_the_whole_width(model: Any):
    """64 divides 64 once and 128 twice: of the narrow layers every row is one group."""
    apply_scheme(model, Scheme(activation_bits=16, group_size=64))
    assert model.model.layers[0].self_attn.q_proj.log_clip_OG.shape == (64, 1)
    assert model(**batch()).logits.isfinite().all()


def test_a_decoder_of_another_make_is_refused():
    other = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16, bos_token_id=1, eos_token_id=2))
    with pytest.raises(ValueError, match="GPT2LMHeadModel: reflux quantises decoders"):
        apply_scheme(other, WEIGHTS_ONLY)
