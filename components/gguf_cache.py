"""A GGUF file as folders in Hugging Face layout, each made once: transformers needs seconds to parse its metadata.

That is several times in every stage, and dequantising takes as long as a training step. The cache is REFLUX_CACHE,
default ~/.cache/reflux, by the digest of the file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def described(gguf: Path) -> Path:
    """The folder with its configuration and tokenizer, for those who need no weights."""
    return _once(gguf, "descriptions", _describe)


def converted(gguf: Path) -> Path:
    """The folder with its configuration and its weights, in float32."""
    return _once(gguf, "models", _convert)


def _describe(gguf: Path, folder: Path) -> None:
    AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _convert(gguf: Path, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model.is_quantized, model.hf_quantizer = False, None  # plain tensors now; the flag would refuse training
    del model.config.quantization_config
    model.save_pretrained(folder)


def _once(gguf: Path, kind: str, write: Callable[[Path, Path], None]) -> Path:
    """The folder of this kind, written once and moved into place whole."""
    with gguf.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    cache = Path(os.environ.get("REFLUX_CACHE", Path.home() / ".cache" / "reflux")) / kind
    folder = cache / digest[:32]
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=cache))
    try:
        write(gguf, partial)
        os.replace(partial, folder)
    except OSError:
        if not folder.exists():  # another process may have finished first: its folder is as good
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
