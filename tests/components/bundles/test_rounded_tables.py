"""Bundles whose embedding is of 8 bits: no runtime loads another one in its place, and no entry goes unread."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_bundle import write_tiny_bundle
from tiny_model import save_untied
from transformers import AutoModelForCausalLM

from reflux.components.algorithms.output_head import output_head
from reflux.components.bundles.bundle import load_bundle
from reflux.components.bundles.transformers_bundle import load_deployed, low_bit_config
from reflux.components.models import load_model

EMBEDDING, HEAD, LINEAR = "model.embed_tokens", "lm_head", "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def bundle(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a head of its own."""
    base = save_untied(tmp_path_factory.mktemp("base") / "model", tiny_model)
    return write_tiny_bundle(base.parent / "bundle", base, embedding_bits=8)


def simulated(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, config=low_bit_config(folder))


def test_transformers_alone_refuses_it(bundle: Path) -> None:
    load = f"from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained({str(bundle)!r})"
    done = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "quant_method" in done.stderr.splitlines()[-1]
    said = json.loads((bundle / "config.json").read_text())["quantization_config"]
    assert said == {"load_with": f"{low_bit_config.__module__}.{low_bit_config.__qualname__}"}


def test_a_forgotten_configuration_is_asked_for(bundle: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "reflux"}}))
    with pytest.raises(ValueError, match=r"give from_pretrained config=low_bit_config\(FOLDER\)"):
        AutoModelForCausalLM.from_pretrained(folder)


def _without(config: dict[str, Any], part: str, name: str) -> None:
    del config[part][name]


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no tables": (lambda c: c.pop("tables"), r"tables \[\] of \[\] bits, the scheme has embedding_bits 8"),
    "no head": (lambda c: _without(c, "tables", HEAD), r"lm_head is packed in .* not described|they are .*lm_head"),
    "no embedding": (lambda c: _without(c, "tables", EMBEDDING), r"embed_tokens is packed in|they are .*embed_tokens"),
    "no linear": (lambda c: _without(c, "weights", LINEAR), rf"{LINEAR} is packed in .* not described"),
    "one more": (lambda c: c["weights"].update(other=c["weights"][LINEAR]), "describes other, which is not packed"),
    "table of 4 bits": (
        lambda c: c["tables"][HEAD].update(bits=4),
        r"of \[4, 8\] bits, the scheme has embedding_bits 8",
    ),
    "linear of 8 bits": (
        lambda c: c["weights"][LINEAR].update(bits=8),
        rf"{LINEAR}: bits 8, but .* 8 words for 64 codes",
    ),
    "zero points": (lambda c: c["weights"][LINEAR].update(zero_point=3), rf"{LINEAR}: zero_point 3; allowed are 0 and"),
}


@pytest.mark.parametrize("load", [load_bundle, simulated, load_deployed])
@pytest.mark.parametrize("change", CHANGES)
def test_what_does_not_describe_the_weights_is_named(
    bundle: Path, tmp_path: Path, load: Callable[[Path], Any], change: str
) -> None:
    folder = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    config = json.loads((folder / "quant_config.json").read_text())
    alter, message = CHANGES[change]
    alter(config)
    (folder / "quant_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load(folder)


@torch.no_grad()
def test_an_evaluation_multiplies_the_codes_too(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deployed = load_deployed(bundle)
    monkeypatch.delattr(type(deployed.lm_head).__mro__[1], "weight")
    hidden_ND = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert torch.equal(output_head(deployed)(hidden_ND), deployed.lm_head(hidden_ND))


def test_two_tables_in_the_files_stay_two(tiny_model: Path, tmp_path: Path) -> None:
    base = save_untied(tmp_path / "base", tiny_model)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    loaded = load_model(base)
    assert loaded.config.tie_word_embeddings is False
    assert torch.equal(load_bundle(write_tiny_bundle(tmp_path / "b", base)).lm_head.weight, loaded.lm_head.weight)
    assert torch.equal(loaded.lm_head.weight, 1.5 * loaded.model.embed_tokens.weight)
