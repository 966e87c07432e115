"""A two-layer Llama with a byte-level tokenizer and a chat template, small enough for every test."""

from __future__ import annotations

from pathlib import Path

TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def save_tiny_model(folder: Path, *, layers: int = 2, seed: int = 0, head_dim: int = 16) -> Path:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<|pad|>", "<|start|>", "<|end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(special + alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<|pad|>", bos_token="<|start|>", eos_token="<|end|>", chat_template=TEMPLATE
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 5,  # padded rows, as real models have
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    torch.random.set_rng_state(state)
    tokenizer.save_pretrained(folder)
    return folder


def save_untied(folder: Path, model: Path) -> Path:
    """A copy of the model with an output head of its own: one and a half times the embedding."""
    import shutil

    import torch
    from transformers import AutoModelForCausalLM

    shutil.copytree(model, folder)
    untied = AutoModelForCausalLM.from_pretrained(folder)
    untied.config.tie_word_embeddings = False
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.detach() * 1.5)
    untied.save_pretrained(folder)
    return folder
