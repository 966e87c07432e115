"""The student that a profile describes: as it came, or with the channels that profile_kv has rescaled."""

from __future__ import annotations

from typing import Any

import torch

from reflux.components.algorithms.equalization import equalize
from reflux.components.artifacts import Artifact


def is_equalized(profile: Artifact) -> bool:
    """Whether it is of rescaled channels."""
    return bool(profile.shards("equalization"))


def equalized(model: Any, profile: Artifact) -> Any:
    """`model`, changed in place if the profile's was, and returned. ValueError if it is another model than that."""
    if is_equalized(profile):
        table = profile.table("equalization", ["site", "scale"])
        scales = zip(table["site"].to_pylist(), table["scale"].to_pylist(), strict=True)
        equalize(model, {site: torch.tensor(scale) for site, scale in scales})
    return model
