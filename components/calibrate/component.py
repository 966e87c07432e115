"""Declares calibrate: what distill learned, frozen into a bundle."""

from reflux.components.calibrate.config import CalibrateConfig
from reflux.components.declare import container_component

calibrate = container_component(
    "calibrate", CalibrateConfig, inputs=["student", "profile", "traces"], outputs=["bundle"]
)
