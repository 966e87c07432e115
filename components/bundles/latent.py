"""Master weights as distill leaves them, in latent.safetensors: full precision, before rounding, marked `latent`.

Deployed weights lie on the grid. Taken for master weights they would be rounded once more, or trained from where
nothing is left between two codes, and nobody would be told; so what is not marked is refused wherever master weights
are read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

NAME = "latent.safetensors"
LATENT = {"checkpoint": "latent"}
"""Metadata of the file."""
ZERO_POINTS = ".zero_OG"
"""End of the name of a linear's zero points, which the file has where a training began with a checkpoint's."""


def load_latent(model: Any, file: Path, *, who: str, base: str) -> None:
    """Give a model under its scheme the master weights in `file`. ValueError, which begins with `who`, if they are not
    marked as such, not finite, or belong to another model than `base`.
    """
    try:
        with safe_open(file, framework="pt") as latent:
            if (latent.metadata() or {}).get("checkpoint") != LATENT["checkpoint"]:
                raise ValueError(f"{who}: {NAME} is not marked as master weights; refusing to quantise it again")
            state = {name: latent.get_tensor(name) for name in latent.keys()}  # noqa: SIM118  no mapping
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{who}: {file.name} cannot be read as safetensors ({error})") from error
    for name, value in state.items():
        if not value.isfinite().all():
            raise ValueError(f"{who}: {name} is not finite everywhere, and cannot be put on a grid")
    for name, module in model.named_modules():
        if f"{name}{ZERO_POINTS}" in state:
            module.zero_OG = state[f"{name}{ZERO_POINTS}"]
    unknown = model.load_state_dict(state, strict=False).unexpected_keys
    if unknown:
        raise ValueError(f"{who}: {len(unknown)} weights do not belong to {base}, e.g. {unknown[0]}")
