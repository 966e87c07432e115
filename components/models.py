"""Load teacher and student, and say whether the two can be compared.

A model path is a folder in Hugging Face layout or a single GGUF file, which gguf_cache turns into such folders. The
vocabulary is the tokenizer's: models of one tokenizer may pad their embedding to different sizes, and those rows mean
nothing.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from reflux.components import gguf_cache
from reflux.components.algorithms.low_bit import decoder_layers
from reflux.components.model_files import require_configuration, require_tokenizer, require_weights

transformers_logging.disable_progress_bar()  # a bar of its own would break the progress lines of the stage

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a model folder or GGUF file. ValueError if there is none that can be used for chat."""
    folder = _description(path)
    require_tokenizer(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of transformers and of the tokenizers' Rust, which raises plain Exception
        raise ValueError(f"model {path}: no usable tokenizer ({_line(error)})") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"model {path}: the tokenizer has no EOS token, so no answer could ever end")
    if tokenizer.chat_template is None:
        raise ValueError(f"model {path}: the tokenizer has no chat template; reflux asks its teacher through one")
    return tokenizer


def load_model(path: Path, dtype: str = "float32") -> Any:
    """A causal language model in eval mode, without gradients. ValueError names the path and the cause."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: allowed are {sorted(DTYPES)}")
    folder = hugging_face_folder(path)
    require_configuration(folder)
    require_weights(folder)
    try:
        model, told = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[dtype], local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"model {path}: cannot be loaded ({_line(error)})") from error
    except RuntimeError as error:
        raise ValueError(f"model {path}: its weights are not of the shapes that config.json gives") from error
    if missing := sorted(told["missing_keys"]):  # transformers makes them up and goes on
        raise ValueError(f"model {path}: {len(missing)} weights are in no file, e.g. {missing[0]}")
    head = model.get_output_embeddings()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        model.config.tie_word_embeddings = False  # two tables in the files are two, whatever config.json says
    return model.eval().requires_grad_(False)


def hugging_face_folder(path: Path) -> Path:
    """The model as a folder in Hugging Face layout, which for a GGUF file is made once and kept."""
    return gguf_cache.converted(path) if path.suffix == ".gguf" else path


def compute_dtype(name: str, device: str = "cpu") -> torch.dtype:
    """The type of a forward pass under autocast. "auto" is bfloat16 where this CPU multiplies it natively, which is
    about twice as fast there and slower everywhere else.
    """
    if name == "auto":
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        if device == "cuda":
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float32
    return DTYPES[name]


def context_length(path: Path) -> int:
    """Tokens that the model can attend to, prompt and answer together."""
    return int(_configured(path, "max_position_embeddings"))


def skeleton(path: Path) -> Any:
    """The model without its weights, on the meta device. ValueError if its configuration cannot be used."""
    with torch.device("meta"):  # no weight is made
        return AutoModelForCausalLM.from_config(_configuration(path))


def kv_shape(path: Path) -> tuple[int, int]:
    """KV heads of a layer, and channels of a head."""
    return _configured(path, "num_key_value_heads"), _head_channels(path)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model, from its configuration alone."""

    parameters: int
    decoder: int
    """Parameters of the decoder layers."""
    shared: int
    """Parameters that are embedding and head at once; 0 if each has its own."""
    linear: int
    """Of these, weights of linear layers."""
    layers: int
    hidden: int
    intermediate: int
    kv_channels: int
    """Of one layer's keys, all heads together."""
    vocabulary: int


def model_shape(path: Path) -> ModelShape:
    """Sizes of the model behind a path. ValueError if its configuration is of another kind than Llama's."""
    model = skeleton(path)
    layers = decoder_layers(model)
    heads, channels = kv_shape(path)
    embedding = model.get_input_embeddings().weight
    return ModelShape(
        parameters=sum(p.numel() for p in model.parameters()),
        decoder=sum(p.numel() for p in layers.parameters()),
        shared=embedding.numel() if embedding is model.get_output_embeddings().weight else 0,
        linear=sum(m.weight.numel() for m in layers.modules() if isinstance(m, torch.nn.Linear)),
        layers=len(layers),
        hidden=_configured(path, "hidden_size"),
        intermediate=_configured(path, "intermediate_size"),
        kv_channels=heads * channels,
        vocabulary=_configured(path, "vocab_size"),
    )


def chat_token_ids(tokenizer: Any, prompt: str) -> list[int]:
    """[P] the user's prompt after the chat template, ready for the answer's first token."""
    encoded = tokenizer.apply_chat_template(chat_messages(prompt), add_generation_prompt=True, return_dict=True)
    return encoded["input_ids"]


def chat_messages(prompt: str) -> list[dict[str, str]]:
    """The conversation that a prompt is."""
    return [{"role": "user", "content": prompt}]


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """sha256 over vocabulary and special tokens: equal fingerprints mean that token ids can be compared."""
    return _sha256({"vocab": tokenizer.get_vocab(), "special": sorted(map(str, tokenizer.all_special_tokens))})


def template_fingerprint(tokenizer: Any) -> str:
    """sha256 of the chat template."""
    return _sha256(tokenizer.chat_template)


def require_same_tokenizer(teacher: Any, student: Any) -> None:
    """Refuse a pair whose token ids differ: token-level objectives would compare different words (objectives.md, rule
    5).
    """
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    differing = [token for token in theirs.keys() | ours.keys() if theirs.get(token) != ours.get(token)]
    if differing:
        sample = ", ".join(repr(token) for token in sorted(differing)[:3])
        raise ValueError(
            f"teacher and student do not share a tokenizer: {len(differing)} tokens have other ids or are missing "
            f"(e.g. {sample}; sizes {len(theirs)} and {len(ours)}). Token-level distillation needs one tokenizer: "
            f"choose a student of the same family"
        )
    if teacher.eos_token_id != student.eos_token_id:
        raise ValueError(
            f"teacher ends answers with {teacher.eos_token!r}, student with {student.eos_token!r}: the student would "
            f"learn not to stop"
        )


def require_same_conversation(teacher: Any, student: Any) -> None:
    """Refuse a pair that is asked in different words: answers collected through one template would not be those to
    the prompts of the other, and distill would refuse them once they are there.
    """
    if template_fingerprint(teacher) != template_fingerprint(student):
        raise ValueError(
            "teacher and student have different chat templates; give the student's folder the teacher's "
            "chat_template.jinja (or that part of tokenizer_config.json), since its bundle will be asked through it"
        )
    if tokenizer_fingerprint(teacher) != tokenizer_fingerprint(student):
        ours, theirs = set(student.all_special_tokens), set(teacher.all_special_tokens)
        raise ValueError(f"teacher and student have different special tokens: {', '.join(sorted(ours ^ theirs))}")


def require_rows(path: Path, tokenizer: Any) -> None:
    """ValueError if the model's embedding has fewer rows than the tokenizer has words; more are padding."""
    rows = _configured(path, "vocab_size")
    if rows < len(tokenizer):
        raise ValueError(f"model {path}: its vocabulary has {rows} rows, the tokenizer {len(tokenizer)} words")


def _head_channels(path: Path) -> int:
    given = getattr(_configuration(path), "head_dim", None)
    return given or _configured(path, "hidden_size") // _configured(path, "num_attention_heads")


def _configuration(path: Path) -> Any:
    folder = _description(path)
    require_configuration(folder)
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"model {path}: no usable configuration ({_line(error)})") from error


def _configured(path: Path, name: str) -> int:
    value = getattr(_configuration(path), name, None)
    if not isinstance(value, int):
        raise ValueError(f"model {path}: its configuration has no {name}; decoders of the Llama kind are expected")
    return value


def _description(path: Path) -> Path:
    """The folder that holds a model's configuration and tokenizer."""
    return gguf_cache.described(path) if path.suffix == ".gguf" else path


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()
