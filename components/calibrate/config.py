"""How the trained student becomes a bundle."""

from __future__ import annotations

from dataclasses import dataclass

from reflux.components.declare import source

STAGE_VERSION = "16"


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    """Freeze what distill learned, with the same rounding, into files that can be deployed."""

    student_uri: str = source()
    """The student before training: configuration, tokenizer and the parts that stay in full precision."""
    check_traces: int = 8
    """Training traces on which the bundle must agree with the trained forward, and thresholds are calibrated."""
    outlier_quantile: float = 0.99
    """Quantile of the tokens' largest |x| above which deployment counts a token as an outlier, per site."""
    fallback_outlier_share: float = 0.05
    """Share of outlier tokens in a request above which fallback.py takes the W4A16 path."""
    tolerance: float = 1e-3
    """Largest difference of any log-probability, nats, between the bundle and the trained forward; codes are equal."""

    def __post_init__(self) -> None:
        if self.check_traces < 1:
            raise ValueError(f"calibrate.check_traces {self.check_traces}: must be at least 1")
        for name in ("outlier_quantile", "fallback_outlier_share"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"calibrate.{name} {getattr(self, name)}: must be between 0 and 1")
        if not self.tolerance > 0:
            raise ValueError(f"calibrate.tolerance {self.tolerance}: must be positive")
