"""What brew does, and how it fails when asked to."""

from __future__ import annotations

from dataclasses import dataclass

from reflux.components.declare import setting, source

STAGE_VERSION = "1"


@dataclass(frozen=True, kw_only=True)
class BrewConfig:
    """Make tea."""

    leaves: str = source()
    """A text file."""
    minutes: int = 3
    """Minutes in the pot, from 1."""
    note: str = ""
    """Any text."""
    fault: str = setting("")
    """value, crash, outage, kill, memory or sleep: how the stage ends early."""
    steps: int = setting(4)
    """Points that are published."""

    def __post_init__(self) -> None:
        if self.minutes < 1:
            raise ValueError(f"brew.minutes {self.minutes}: must be at least 1")
