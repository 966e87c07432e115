"""A bundle answers as its base model does: how it samples and what ends an answer go along. In full precision here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from reflux.components import models
from reflux.components.algorithms.low_bit import FULL_PRECISION, Scheme, apply_scheme
from reflux.components.bundles.bundle import load_bundle
from reflux.components.bundles.bundle_digests import digests
from reflux.components.calibrate.bundle_files import fallback
from reflux.components.calibrate.export import write_bundle


def bundled(base: Path, folder: Path) -> Path:
    scheme = Scheme(weight_bits=FULL_PRECISION, activation_bits=FULL_PRECISION)
    student = apply_scheme(models.load_model(base), scheme, None)
    folder.mkdir()
    tokenizer = models.load_tokenizer(base)
    write_bundle(folder, student, tokenizer, scheme, thresholds={}, fallback_share=0.05, base_digest="", card="")
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": True, "temperature": 3.0, "top_k": 40, "repetition_penalty": 1.3, "eos_token_id": [2, 77]},
        {"do_sample": False, "temperature": 0.6, "eos_token_id": [2, 77]},  # which save_pretrained would refuse
    ],
)
def test_a_bundle_generates_as_the_original_does(tiny_model: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    base = Path(shutil.copytree(tiny_model, tmp_path / "base"))
    (base / "generation_config.json").write_text(json.dumps(settings | {"pad_token_id": 0, "bos_token_id": 1}))
    original, bundle = models.load_model(base), bundled(base, tmp_path / "bundle")
    ours = load_bundle(bundle)
    assert ours.generation_config.to_diff_dict() == original.generation_config.to_diff_dict()
    assert json.loads((bundle / "generation_config.json").read_text()).items() >= settings.items()
    ids = torch.arange(5, 15)[None]
    answers = []
    for model in (original, ours):
        torch.manual_seed(3)
        answers.append(model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40)[0].tolist())
    assert answers[0] == answers[1]


def test_fallback_ends_an_answer_where_the_base_model_does(tiny_model: Path, tmp_path: Path) -> None:
    """Chat models have more tokens that end an answer than the one that their tokenizer names."""
    bundle = bundled(tiny_model, tmp_path / "bundle")
    tokenizer = models.load_tokenizer(bundle)
    before = fallback.Server(bundle).answer("What is 3 and 3?", 8)["text"]
    ids = torch.tensor([models.chat_token_ids(tokenizer, "What is 3 and 3?")])
    with torch.no_grad():
        first = load_bundle(bundle)(ids, position_ids=torch.arange(ids.shape[1])[None]).logits[0, -1].argmax().item()
    path = bundle / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [2, first]}))
    config = json.loads((bundle / "quant_config.json").read_text()) | {"files": digests(bundle)}
    (bundle / "quant_config.json").write_text(json.dumps(config))
    after = fallback.Server(bundle).answer("What is 3 and 3?", 8)["text"]
    assert after == tokenizer.decode([first])
    assert len(before) > len(after)
