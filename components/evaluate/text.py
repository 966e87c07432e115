"""The evaluation text: human-written, the same on every machine, and in no training data of ours.

Without the user's own file it is the language reference that ships inside CPython. Windows are spread evenly over the
text, since its topics differ. Shapes: W windows, T tokens of a window.
"""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class EvaluationText:
    name: str
    sha256: str
    window_WT: Tensor
    """Token ids. The first of a window is context only: T - 1 tokens are scored."""

    @property
    def scored_tokens(self) -> int:
        windows, tokens = self.window_WT.shape
        return windows * (tokens - 1)


def evaluation_text(path: Path | None, tokenizer: Any, *, windows: int, window_tokens: int) -> EvaluationText:
    """The text's windows. ValueError if it is not UTF-8 or too short for them."""
    name, text = _bundled_text() if path is None else (path.name, _read(path))
    return EvaluationText(
        name=name,
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        window_WT=_windows(name, text, tokenizer, windows, window_tokens),
    )


def _bundled_text() -> tuple[str, str]:
    from pydoc_data.topics import topics

    return f"pydoc_data.topics of Python {platform.python_version()}", "\n\n".join(
        topics[key] for key in sorted(topics)
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise ValueError(f"evaluate.eval_text_uri {path.name}: not a readable UTF-8 text ({error})") from error


def _windows(name: str, text: str, tokenizer: Any, windows: int, window_tokens: int) -> Tensor:
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    start = tokenizer("a")["input_ids"][:1]  # the BOS token where this tokenizer writes one of its own accord
    start = start if start == [tokenizer.bos_token_id] else []
    length = window_tokens - len(start)
    if len(ids) < windows * length:
        raise ValueError(
            f"evaluation text {name}: {len(ids)} tokens are too few for evaluate.windows {windows} of "
            f"evaluate.window_tokens {window_tokens}; lower one of them or give a longer text"
        )
    blocks = (
        len(ids) // length
    )  # the text cut into blocks without overlap, of which every (blocks / windows)-th is taken
    firsts = [w * blocks // windows * length for w in range(windows)]
    return torch.tensor([start + ids[first : first + length] for first in firsts])
