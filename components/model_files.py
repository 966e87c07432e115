"""What a model on disk has to consist of, checked without loading it: transformers' own errors do not name the file.

    a folder     config.json, a tokenizer's files, and model.safetensors or the parts that its index names
    a file       *.gguf, whole

Pickled weights (*.bin) are refused: they can run code when they are read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from reflux.components import gguf_header

INDEX = "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
EXPECTED = "a folder with config.json, tokenizer.json and model.safetensors, or a .gguf file"


def require_model_files(path: Path) -> None:
    """ValueError, naming the file and what is expected of it, unless a model and its tokenizer can lie there."""
    if path.suffix == ".gguf":
        require_gguf(path)
    elif path.is_dir():
        require_configuration(path)
        require_tokenizer(path)
        require_weights(path)
    else:
        raise ValueError(f"model {path}: expected is {EXPECTED}")


def require_configuration(folder: Path) -> None:
    """config.json, and that it names a kind of model."""
    content = _json(folder / "config.json", f"a model is {EXPECTED}")
    if not content.get("model_type"):
        raise ValueError(f"model {folder / 'config.json'}: names no model_type, such as llama")


def require_tokenizer(folder: Path) -> None:
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise ValueError(f"model {folder}: it has no tokenizer; expected is tokenizer.json beside config.json")


def require_weights(folder: Path) -> None:
    """Every file of weights is there, and its header describes exactly as many bytes as it has."""
    single = folder / "model.safetensors"
    if single.is_file():
        files = [single]
    elif (folder / INDEX).is_file():
        named = _json(folder / INDEX, "").get("weight_map")
        if not isinstance(named, dict) or not named:
            raise ValueError(f"model {folder / INDEX}: names no weights in its weight_map")
        files = [folder / name for name in sorted(set(named.values()))]
    else:
        pickled = next(folder.glob("*.bin"), None)
        hint = f"; {pickled.name} is pickled, which is not read: convert it to safetensors" if pickled else ""
        raise ValueError(f"model {folder}: it has no weights; expected is model.safetensors or {INDEX}{hint}")
    for file in files:
        _require_safetensors(file)


def require_gguf(file: Path) -> None:
    """The first bytes; what lies behind them shows when it is parsed."""
    if not file.is_file():
        raise ValueError(f"model {file}: no such file")
    with file.open("rb") as stream:
        if stream.read(len(gguf_header.MAGIC)) != gguf_header.MAGIC:
            raise ValueError(
                f"model {file}: is no GGUF file, it does not begin with GGUF; was it downloaded as a page?"
            )


def _require_safetensors(file: Path) -> None:
    if not file.is_file():
        raise ValueError(f"model {file}: is missing, though {INDEX} names it")
    try:
        with safe_open(file, framework="pt"):
            pass
    except (OSError, SafetensorError) as error:
        raise ValueError(f"model {file}: is no whole safetensors file ({error}); copy it again") from error


def _json(file: Path, otherwise: str) -> dict[str, Any]:
    """The object in a file. `otherwise` says what a missing one means."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"model {file}: is missing; {otherwise}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"model {file}: is not readable JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"model {file}: must hold a JSON object, not a {type(content).__name__}")
    return content
