"""A GGUF file as folders in Hugging Face layout, each made once: transformers needs seconds to parse its metadata.

That is several times in every stage, and dequantising takes as long as a training step. The cache is REFLUX_CACHE,
default ~/.cache/reflux: what needs no weights by the digest of the file's header, the rest by that of the file.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from reflux.components import gguf_header, sources
from reflux.components.cache import cache_folder, made_once
from reflux.components.model_files import require_gguf


def described(gguf: Path) -> Path:
    """The folder with its configuration and tokenizer, for those who need no weights: a stand-in of the file serves."""
    return _once(gguf, "descriptions", _header_digest, _describe)


def converted(gguf: Path) -> Path:
    """The folder with its configuration and its weights, in float32."""
    return _once(gguf, "models", sources.digest, _convert)


def _describe(gguf: Path, folder: Path) -> None:
    AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _convert(gguf: Path, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model.is_quantized, model.hf_quantizer = False, None  # plain tensors now; the flag would refuse training
    del model.config.quantization_config
    model.save_pretrained(folder)


def _header_digest(gguf: Path) -> str:
    """Of the header and the length: a file that was cut is another one."""
    with gguf.open("rb") as stream:

        def read(count: int) -> bytes:
            stream.seek(0)
            return stream.read(count)

        sha256 = hashlib.sha256(gguf_header.header(read) + str(gguf.stat().st_size).encode())
    return f"sha256:{sha256.hexdigest()}"


def _once(gguf: Path, kind: str, digest: Callable[[Path], str], write: Callable[[Path, Path], None]) -> Path:
    """The folder of this kind. ValueError for a file that cannot be read."""
    require_gguf(gguf)
    name = digest(gguf).removeprefix("sha256:")[:32]
    return made_once(cache_folder() / kind / name, lambda folder: _write(write, gguf, folder))


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
