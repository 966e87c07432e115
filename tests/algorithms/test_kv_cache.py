"""The tiny model behind a quantised cache: attention against numpy, and every way to run it against every other."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from reflux.components.algorithms.attention_watch import intercepted_attention
from reflux.components.algorithms.draws import Sampling
from reflux.components.algorithms.kv_cache import form_in_use, round_cache
from reflux.components.algorithms.kv_forms import KV_FORMS, rounded_group, rounded_values
from reflux.components.algorithms.low_bit import Scheme, apply_scheme, full_precision_activations
from reflux.components.algorithms.rollouts import Request, rollout
from reflux.components.algorithms.slot_cache import cache_argument
from reflux.components.sequences import packed, padded

TOKENS = 110
"""Two groups are rounded for the last of them."""


@pytest.fixture(scope="module")
def full(tiny_model: Path) -> Any:
    """In float64, where no code lies on an edge between two right forwards."""
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64).eval()


def behind(full: Any, name: str) -> Any:
    model = copy.deepcopy(full)
    round_cache(model, [layer.self_attn for layer in model.model.layers], name)
    return model


def batch(rows: int = 2, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(3, 259, (rows, tokens), generator=torch.Generator().manual_seed(1))


def whole(model: Any, input_BT: torch.Tensor) -> torch.Tensor:
    position_BT = torch.arange(input_BT.shape[1]).expand_as(input_BT)
    return model(input_ids=input_BT, position_ids=position_BT, use_cache=False).logits


def in_pieces(model: Any, input_BT: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    logits, cache, begin = [], None, 0
    for size in sizes:
        piece = slice(begin, begin + size)
        output = model(
            input_ids=input_BT[:, piece],
            position_ids=torch.arange(begin, begin + size).expand(len(input_BT), -1),
            use_cache=True,
            **{cache_argument(model): cache},
        )
        cache, begin = getattr(output, cache_argument(model)), begin + size
        logits.append(output.logits)
    return torch.cat(logits, 1)


@torch.no_grad()
@pytest.mark.parametrize("name", KV_FORMS)
def test_attention_reads_rounded_keys_and_values(full: Any, name: str) -> None:
    """Layer 0, query by query in numpy: its keys and values are those of a model without a quantised cache."""
    form, seen, read = KV_FORMS[name], list[Any](), list[torch.Tensor]()

    def keep(attend: Any, module: Any, *states: Any, **options: Any) -> Any:
        result = attend(module, *states, **options)
        if module.layer_idx == 0:
            seen.append(states)
            read.append(result[0])
        return result

    for model in (full, behind(full, name)):
        with intercepted_attention(model, keep):
            whole(model, batch())
    query_BHTd, key_BGTd, value_BGTd = seen[0][:3]
    for b, h, t in [(0, 0, 0), (0, 3, 63), (1, 2, 64), (0, 1, 95), (1, 0, 96), (1, 3, TOKENS - 1)]:
        key_Td, value_Td = key_BGTd[b, h // 2, : t + 1].clone(), value_BGTd[b, h // 2, : t + 1].clone()
        if form.group:
            for begin in range(0, max(0, t - form.window) // form.group * form.group, form.group):
                group = slice(begin, begin + form.group)
                key_Td[group] = rounded_group(key_Td[group, None], form.bits)[:, 0]
                value_Td[group] = rounded_values(value_Td[group], form)
        else:
            top = 2 ** (form.bits - 1) - 1
            for states_Td in (key_Td, value_Td):
                scale_T1 = (states_Td.abs().amax(-1, keepdim=True) / top).to(torch.float16).double()
                states_Td.copy_((states_Td / scale_T1).round().clamp(-top, top) * scale_T1)
        score_T = key_Td.numpy() @ query_BHTd[b, h, t].numpy() * query_BHTd.shape[-1] ** -0.5
        weight_T = np.exp(score_T - score_T.max())
        expected_d = weight_T @ value_Td.numpy() / weight_T.sum()
        np.testing.assert_allclose(read[1][b, t, h].numpy(), expected_d, atol=1e-10)
    assert not torch.allclose(read[0], read[1], atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", KV_FORMS)
def test_token_by_token_equals_the_whole_sequence(full: Any, name: str) -> None:
    model = behind(full, name)
    expected = whole(model, batch())
    assert (expected - whole(full, batch())).abs().mean() > 1e-4
    for sizes in ([1] * TOKENS, [90, *[1] * 20], [33, 40, 37]):
        torch.testing.assert_close(in_pieces(model, batch(), sizes), expected, atol=1e-8, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("name", KV_FORMS)
def test_rollouts_see_what_a_scored_sequence_sees(full: Any, name: str) -> None:
    """Prompts of unlike length, more requests than slots, and prompts that come again when others have gone on."""
    model, tokens = behind(full, name), batch(1, 131)[0].tolist()
    prompts = [tokens[:1], tokens[:70], tokens[:100], tokens, tokens[:70], tokens[:70], tokens[:64]]
    seen: dict[int, list[torch.Tensor]] = {row: [] for row in range(len(prompts))}

    def on_step(rows: list[int], logits_BV: torch.Tensor) -> None:
        for row, logits_V in zip(rows, logits_BV, strict=True):
            seen[row].append(logits_V.clone())

    done = rollout(
        model,
        [Request(prompt_token_ids=prompt, seed=seed) for seed, prompt in enumerate(prompts)],
        Sampling(temperature=1.0, max_new_tokens=40),
        eos_token_id=2,
        vocab_size=259,
        slots=3,
        on_step=on_step,
    )
    for row, answer in enumerate(done):
        ids = torch.tensor([answer.prompt_token_ids + answer.response_token_ids])
        forced = whole(model, ids)[0, len(answer.prompt_token_ids) - 1 : -1, :259].float()
        torch.testing.assert_close(torch.stack(seen[row]), forced, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("name", ["int4", "kivi2"])
def test_neither_padding_nor_packing_changes_a_sequence(full: Any, name: str) -> None:
    model = behind(full, name)
    rows = [batch(1, 100)[0].tolist(), batch(1, 73)[0].tolist(), [7, 8]]
    alone = [whole(model, torch.tensor([row]))[0] for row in rows]

    input_BT, mask_BT, position_BT = padded(rows, 0)
    right = model(input_ids=input_BT, attention_mask=mask_BT, position_ids=position_BT, use_cache=False).logits
    left_BT = torch.stack(
        [ids_T.roll(int(100 - mask_T.sum())) for ids_T, mask_T in zip(input_BT, mask_BT, strict=True)]
    )
    mask_BT = mask_BT.flip(-1)
    position_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
    left = model(input_ids=left_BT, attention_mask=mask_BT, position_ids=position_BT, use_cache=False).logits
    input_RT, position_RT, places = packed(rows, 0, 180)
    together = model(input_ids=input_RT, position_ids=position_RT, use_cache=False).logits
    for row, (expected, (place, begin)) in enumerate(zip(alone, places, strict=True)):
        torch.testing.assert_close(right[row, : len(expected)], expected, atol=1e-8, rtol=0)
        torch.testing.assert_close(left[row, 100 - len(expected) :], expected, atol=1e-8, rtol=0)
        torch.testing.assert_close(together[place, begin : begin + len(expected)], expected, atol=1e-8, rtol=0)


@torch.no_grad()
def test_generate_sees_what_rollouts_see(full: Any) -> None:
    model, prompt = behind(full, "kivi2"), batch(1, 90)
    model.generation_config.eos_token_id = None
    ours = rollout(
        model,
        [Request(prompt_token_ids=prompt[0].tolist(), seed=0)],
        Sampling(temperature=0.0, max_new_tokens=50),
        eos_token_id=-1,
        vocab_size=model.config.vocab_size,
    )
    theirs = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=50, do_sample=False, pad_token_id=0
    )
    assert theirs[0, 90:].tolist() == ours[0].response_token_ids


@torch.no_grad()
def test_both_attentions_that_take_a_mask_agree_and_others_are_refused(full: Any) -> None:
    eager = copy.deepcopy(full)
    eager.set_attn_implementation("eager")
    difference = whole(behind(eager, "kivi4"), batch()) - whole(behind(full, "kivi4"), batch())
    assert difference.abs().mean() < 1e-5  # eager attention has its softmax in float32
    other = copy.deepcopy(full)
    other.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="kv_cache 'kivi4': needs an attention that takes any mask, eager or sdpa"):
        behind(other, "kivi4")
    assert behind(other, "int8").kv_form == KV_FORMS["int8"]
    forgetful = copy.deepcopy(full)
    forgetful.config.sliding_window = 64
    with pytest.raises(ValueError, match="kv_cache 'kivi2': LlamaForCausalLM has layers that forget what is 64 tokens"):
        behind(forgetful, "kivi2")


@pytest.mark.parametrize("name", ["int8", "kivi4"])
def test_gradients_reach_what_made_keys_and_values(full: Any, name: str) -> None:
    model = behind(full, name).requires_grad_(True)
    whole(model, batch()).pow(2).mean().backward()
    for layer in model.model.layers:
        for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            assert linear.weight.grad.isfinite().all()
            assert linear.weight.grad.abs().sum() > 0


@torch.no_grad()
def test_a_scheme_has_its_cache_where_it_rounds_activations(full: Any) -> None:
    scheme = Scheme(weight_bits=16, activation_bits=16, kv_cache="kivi2")
    model = apply_scheme(copy.deepcopy(full), scheme)
    rounded = whole(model, batch())
    assert torch.equal(rounded, whole(behind(full, "kivi2"), batch()))
    with full_precision_activations(model):
        assert form_in_use(model) is None
        assert torch.equal(whole(model, batch()), whole(full, batch()))
    assert scheme.weights_only() == Scheme(weight_bits=16, activation_bits=16)
    short = batch(1, 64)  # the whole sequence lies in the window
    assert torch.equal(whole(model, short), whole(full, short))
