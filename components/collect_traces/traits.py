"""What is known of a prompt as text, by libraries that others maintain: its language, and how many entities it names.

Focused attention harms languages and questions that it was not trained for, so both stand with the trace. The language
detector carries its model in its package. No recogniser of names does, so entities are counted only by a model that
the configuration names; there is no rule of ours in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from py3langid.langid import MODEL_FILE, LanguageIdentifier
from transformers import AutoModelForTokenClassification, AutoTokenizer, pipeline

from reflux.components.collect_traces.prompts import Prompt

LEAST_CONFIDENCE = 0.2
"""Below it a language is not told; the detector's confidence grows with the length of the text."""
OVERLAP_TOKENS = 32
"""Between the windows in which a long prompt is searched for entities: a name is shorter."""


def with_traits(prompts: list[Prompt], entity_model: Path | None) -> list[Prompt]:
    """The prompts with language and, if a model is given, entity count. ValueError for a model that is none for it."""
    identifier = _language_identifier()
    count_entities = entity_counter(entity_model) if entity_model else None
    described = []
    for prompt in prompts:
        language, confidence = identifier.classify(prompt.text)
        described.append(
            replace(
                prompt,
                language=language,
                language_confidence=float(confidence),
                entity_count=count_entities(prompt.text) if count_entities else None,
            )
        )
    return described


@functools.cache  # a second to unpack
def _language_identifier() -> LanguageIdentifier:
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True, min_confidence=LEAST_CONFIDENCE)


def language_detector() -> str:
    """Name and version, since another version may tell another language."""
    return f"py3langid {version('py3langid')}"


def entity_counter(path: Path) -> Callable[[str], int]:
    """Counts the spans that a token classification model marks in a text of any length, on the CPU."""
    try:
        model, told = AutoModelForTokenClassification.from_pretrained(
            path, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"collect_traces.entity_model {path}: cannot be loaded ({error})") from error
    if told["missing_keys"]:  # transformers would make them up and mark at random
        raise ValueError(f"collect_traces.entity_model {path}: holds no token classification model")
    if not tokenizer.is_fast:
        raise ValueError(f"collect_traces.entity_model {path}: its tokenizer does not tell where tokens stand")
    # some tokenizers name no limit, and some models number positions from 2
    positions = getattr(model.config, "max_position_embeddings", tokenizer.model_max_length) - 2
    tokenizer.model_max_length = min(tokenizer.model_max_length, positions)
    mark = pipeline(
        "token-classification", model=model, tokenizer=tokenizer, aggregation_strategy="simple",
        stride=min(OVERLAP_TOKENS, positions // 4), device="cpu",
    )  # fmt: skip
    return lambda text: len(mark(text))
