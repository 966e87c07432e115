"""Declares distill: the low-bit student learns from its own rollouts and the teacher's traces."""

from reflux.components.declare import container_component
from reflux.components.distill.config import DistillConfig

distill = container_component(
    "distill", DistillConfig, inputs=["traces", "profile", "labels"], outputs=["student"], distributed=True
)
