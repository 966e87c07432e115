"""What pour does."""

from __future__ import annotations

from dataclasses import dataclass, field

from reflux.components.declare import setting

STAGE_VERSION = "1"


@dataclass(frozen=True, kw_only=True)
class PourConfig:
    """Pour tea into cups."""

    cups: int = 2
    """Cups."""
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    """Size of each cup, litres."""
    sweet: bool = True
    """With sugar."""
    registered_model: str = setting("")
    """Of the registry; "" is none."""
