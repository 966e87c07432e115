"""A GGUF file as folders in Hugging Face layout, each made once: transformers needs seconds to parse its metadata.

That is several times in every stage, and dequantising takes as long as a training step. The cache is REFLUX_CACHE,
default ~/.cache/reflux, by the digest of the file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from reflux.components.model_files import require_gguf


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
    """The folder of this kind, written once and moved into place whole. ValueError for a file that cannot be read."""
    require_gguf(gguf)
    with gguf.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    cache = Path(os.environ.get("REFLUX_CACHE", Path.home() / ".cache" / "reflux")) / kind
    folder = cache / digest[:32]
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=cache))
    try:
        _write(write, gguf, partial)
        os.replace(partial, folder)
    except OSError:
        if not folder.exists():  # another process may have finished first: its folder is as good
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _write(write: Callable[[Path, Path], None], gguf: Path, partial: Path) -> None:
    try:
        write(gguf, partial)
    except (ValueError, IndexError, KeyError, OverflowError, struct.error) as error:
        cause = " ".join(str(error).split())[:300]
        if not _parses(gguf):  # else transformers does not know the kind of model
            cause = f"it ends too early or is damaged ({cause}); copy it again"
        raise ValueError(f"model {gguf}: {cause}") from error


def _parses(gguf: Path) -> bool:
    """Whether header, names and every tensor lie within the file."""
    from gguf import GGUFReader  # only to explain a failure: parsing takes seconds

    try:
        GGUFReader(gguf)
    except (ValueError, IndexError, KeyError, OverflowError, struct.error):
        return False
    return True
