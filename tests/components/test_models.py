"""Models on disk: what loads, and which pairs and folders are refused with the path and the reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from reflux.components.model_files import INDEX, require_model_files
from reflux.components.models import (
    chat_token_ids,
    context_length,
    load_model,
    load_tokenizer,
    require_same_tokenizer,
    template_fingerprint,
    tokenizer_fingerprint,
)


@pytest.fixture
def changed(tiny_model: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the tiny model with values of one JSON file replaced, or taken out with None."""

    def changed(file: str, **values: Any) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(tiny_model, folder)
        content = json.loads((folder / file).read_text()) | values
        (folder / file).write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
        return folder

    return changed


def test_a_model_comes_in_eval_mode_without_gradients_in_the_asked_dtype(tiny_model: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        model = load_model(tiny_model, dtype)
        assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
        assert not model.training
        assert not any(p.requires_grad for p in model.parameters())
    with pytest.raises(ValueError, match=r"dtype 'int4': allowed are \['bfloat16', 'float32'\]"):
        load_model(tiny_model, "int4")


def test_a_prompt_is_put_into_the_chat_template_and_the_answer_comes_next(tiny_model: Path) -> None:
    tokenizer = load_tokenizer(tiny_model)
    text = tokenizer.decode(chat_token_ids(tokenizer, "Grüße, python3!"))
    assert text == "<|start|>user\nGrüße, python3!<|end|>\n<|start|>assistant\n"


def test_context_length(tiny_model: Path, changed: Callable[..., Path]) -> None:
    assert context_length(tiny_model) == 512
    assert context_length(changed("config.json", max_position_embeddings=64)) == 64


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_a_missing_model_is_named(load: Callable[[Path], Any], tmp_path: Path) -> None:
    empty = tmp_path / "nothing here"
    empty.mkdir()
    for path in (empty, tmp_path / "absent", tmp_path / "absent.gguf"):
        with pytest.raises(
            ValueError, match=rf"model .*{path.name}(/config.json)?: (it has no|is missing|no such file)"
        ):
            load(path)


def test_a_missing_context_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model .*absent/config.json: is missing; a model is a folder with"):
        context_length(tmp_path / "absent")


def test_weights_cut_short_are_refused(changed: Callable[..., Path]) -> None:
    folder = changed("config.json")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"model .*changed/model.safetensors: is no whole safetensors file"):
        load_model(folder)


def test_a_weight_that_is_in_no_file_is_not_made_up(changed: Callable[..., Path]) -> None:
    folder = changed("config.json")
    weights = load_file(folder / "model.safetensors")
    lost = weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"changed: 1 weights are in no file, e.g. model.layers.1.mlp.up_proj.weight"):
        load_model(folder)
    weights["model.layers.1.mlp.up_proj.weight"] = lost[:, :32].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"not of the shapes that config.json gives"):
        load_model(folder)


def _only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _lost_part(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "model-2-of-2.safetensors"}}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "config.json").unlink(),
            r"changed/config.json: is missing; a model is a folder with",
        ),
        (lambda folder: (folder / "config.json").write_text("{"), r"changed/config.json: is not readable JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), r"changed/config.json: must hold a JSON object"),
        (lambda folder: (folder / "config.json").write_text("{}"), r"changed/config.json: names no model_type"),
        (
            lambda folder: (folder / "tokenizer.json").unlink(),
            r"changed: it has no tokenizer; expected is tokenizer.json",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 99),
            r"changed/model.safetensors: is no whole",
        ),
        (
            lambda folder: (folder / "model.safetensors").unlink(),
            r"changed: it has no weights; expected is model.safet",
        ),
        (_only_pickles, r"pytorch_model.bin is pickled, which is not read: convert it to safetensors"),
        (_lost_part, rf"changed/model-2-of-2.safetensors: is missing, though {INDEX} names it"),
    ],
)
def test_an_incomplete_folder_is_refused_by_the_file(
    changed: Callable[..., Path], damage: Callable[[Path], object], message: str
) -> None:
    folder = changed("config.json")
    require_model_files(folder)
    damage(folder)
    with pytest.raises(ValueError, match=message):
        require_model_files(folder)


def test_what_is_no_model_at_all(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"prompts.jsonl: expected is a folder with .*, or a .gguf file"):
        require_model_files(file)


def test_a_gguf_file_that_is_none_or_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFLUX_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    for content in (b"", b"<!DOCTYPE html>"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"model.gguf: is no GGUF file, it does not begin with GGUF"):
            require_model_files(file)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", np.zeros((8, 8), dtype=np.float32))
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    whole = file.read_bytes()
    for size in (12, 60, len(whole) - 100):
        file.write_bytes(whole[:size])
        for load in (load_tokenizer, load_model, context_length):
            with pytest.raises(
                ValueError, match=r"model .*model.gguf: it ends too early or is damaged .*copy it again"
            ):
                load(file)
    assert not list((tmp_path / "cache").rglob("*.json")), "nothing of it stays in the cache"


def test_a_tokenizer_without_template_or_eos_is_refused(changed: Callable[..., Path], tiny_model: Path) -> None:
    folder = changed("tokenizer_config.json", chat_template=None, eos_token=None)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="changed: the tokenizer has no EOS token"):
        load_tokenizer(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|end|>"}))
    with pytest.raises(ValueError, match="changed: the tokenizer has no chat template"):
        load_tokenizer(folder)


def test_a_tokenizer_is_the_same_as_its_copy(tiny_model: Path, changed: Callable[..., Path]) -> None:
    ours, theirs = load_tokenizer(tiny_model), load_tokenizer(changed("config.json", vocab_size=300))
    require_same_tokenizer(ours, theirs)  # padded rows of the embedding mean nothing
    assert tokenizer_fingerprint(ours) == tokenizer_fingerprint(theirs)
    assert template_fingerprint(ours) == template_fingerprint(theirs)


def test_another_vocabulary_is_refused_with_a_sample(tiny_model: Path, changed: Callable[..., Path]) -> None:
    folder = changed("tokenizer_config.json")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    ours, theirs = load_tokenizer(tiny_model), load_tokenizer(folder)
    with pytest.raises(
        ValueError, match=r"do not share a tokenizer: 2 tokens have other ids .*'a', 'b'; sizes 259 and"
    ):
        require_same_tokenizer(ours, theirs)
    assert tokenizer_fingerprint(ours) != tokenizer_fingerprint(theirs)


def test_another_end_of_answer_is_refused(tiny_model: Path, changed: Callable[..., Path]) -> None:
    ours, theirs = load_tokenizer(tiny_model), load_tokenizer(changed("tokenizer_config.json", eos_token="<|pad|>"))
    with pytest.raises(ValueError, match=r"teacher ends answers with '<\|end\|>', student with '<\|pad\|>'"):
        require_same_tokenizer(ours, theirs)
    assert tokenizer_fingerprint(ours) != tokenizer_fingerprint(theirs)


def test_another_template_has_another_fingerprint(tiny_model: Path, changed: Callable[..., Path]) -> None:
    folder = changed("config.json")
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    assert template_fingerprint(load_tokenizer(folder)) != template_fingerprint(load_tokenizer(tiny_model))
