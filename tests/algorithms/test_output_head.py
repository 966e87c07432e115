"""The head alone gives the logits of the whole model, for every family whose logits are transformed."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, LlamaConfig

from reflux.components.algorithms.output_head import final_hidden_states, output_head

TINY = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 1.0,  # logits large enough for scale and cap to show
}
FAMILIES = {
    "plain": LlamaConfig(**TINY),
    "soft cap": Gemma2Config(**TINY, head_dim=8, final_logit_softcapping=3.0),
    "divided": GraniteConfig(**TINY, logits_scaling=8.0),
    "multiplied": CohereConfig(**TINY, logit_scale=0.0625),
}


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_head_of_hidden_states_is_the_models_own_output(family: str):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]).eval()
    input_BT = torch.randint(3, 48, (2, 5))
    mask_BT, position_BT = torch.ones_like(input_BT), torch.arange(5).expand(2, -1)
    hidden_BTD = final_hidden_states(model, input_BT, mask_BT, position_BT)
    own = model(input_ids=input_BT, attention_mask=mask_BT, position_ids=position_BT).logits
    assert torch.allclose(output_head(model)(hidden_BTD), own, atol=1e-5)


def test_an_unknown_transform_is_refused():
    model = AutoModelForCausalLM.from_config(FAMILIES["plain"]).eval()
    model.config.logits_scaling = 2.0  # Llama does not read it, so the two now differ
    with pytest.raises(ValueError, match="LlamaForCausalLM: its logits"):
        output_head(model)
