"""Language and entities of prompts, by the libraries that are used: real text, and a tiny model whose marks we know."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForTokenClassification, BertModel, PreTrainedTokenizerFast

from reflux.components.collect_traces.prompts import Prompt
from reflux.components.collect_traces.traits import entity_counter, with_traits


def prompt(text: str) -> Prompt:
    return Prompt(prompt_id=text[:9], dimension="multi_hop", text=text, token_ids=[1], split="train")


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Which of these two trains arrives first, and how do you know?", "en"),
        ("Welcher der beiden Züge kommt zuerst an, und woher weißt du das?", "de"),
        ("Lequel de ces deux trains arrive le premier, et comment le savez-vous ?", "fr"),
        ("这两列火车哪一列先到？你是怎么知道的？", "zh"),  # noqa: RUF001
        ("Kumpi näistä kahdesta junasta saapuu ensin, ja mistä tiedät sen?", "fi"),
    ],
)
def test_a_sentence_is_enough_to_tell_its_language(text: str, language: str) -> None:
    (described,) = with_traits([prompt(text)], None)
    assert described.language == language
    assert 0.2 <= described.language_confidence <= 1
    assert described.entity_count is None
    assert described.text == text


@pytest.mark.parametrize("text", ["ok", "12 + 30 = ?", "\U0001f600"])
def test_too_little_text_is_of_no_language(text: str) -> None:
    (described,) = with_traits([prompt(text)], None)
    assert described.language in ("und", "zxx")


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "Anna", "Berlin", "went", "to", "and", "."]
LABELS = ["O", "B-PER", "B-LOC"]
NAMES = {"Anna": LABELS.index("B-PER"), "Berlin": LABELS.index("B-LOC")}


def save_marker(folder: Path, *, head: bool = True) -> Path:
    """A model of words whose embedding says which label they have; nothing else reaches the classifier."""
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", WORDS.index("[CLS]")), ("[SEP]", WORDS.index("[SEP]"))]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    ).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=4, num_hidden_layers=0, num_attention_heads=1, intermediate_size=4,
        max_position_embeddings=18, id2label=dict(enumerate(LABELS)), label2id=dict(zip(LABELS, range(3), strict=True)),
    )  # fmt: skip
    if not head:
        BertModel(config).save_pretrained(folder)
        return folder
    model = BertForTokenClassification(config)
    with torch.no_grad():
        for parameter in model.bert.embeddings.parameters():
            parameter.zero_()
        model.bert.embeddings.LayerNorm.weight.fill_(1)
        for index, word in enumerate(WORDS):
            model.bert.embeddings.word_embeddings.weight[index, NAMES.get(word, 0)] = 1
        model.classifier.weight.copy_(torch.eye(3, 4))
        model.classifier.bias.zero_()
    model.save_pretrained(folder)
    return folder


def test_entities_are_counted_by_the_model_that_is_named(tmp_path: Path) -> None:
    model = save_marker(tmp_path)
    described = with_traits([prompt("Anna went to Berlin and Berlin ."), prompt("went to the sea")], model)
    assert [one.entity_count for one in described] == [3, 0]


def test_a_long_prompt_is_searched_to_its_end_and_nothing_counts_twice(tmp_path: Path) -> None:
    count = entity_counter(save_marker(tmp_path))
    assert count("went to and . " * 20 + "Anna") == 1
    assert count("Anna " + "went to and . " * 20) == 1
    assert count("Anna went to Berlin and then . " * 20) == 40


def test_a_model_without_a_classifier_and_a_folder_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"entity_model .*: holds no token classification model"):
        entity_counter(save_marker(tmp_path / "headless", head=False))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"entity_model .*: cannot be loaded"):
        entity_counter(tmp_path / "empty")
