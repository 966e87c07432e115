"""The evaluate stage as a KFP component."""

from reflux.components.declare import container_component

from .config import EvaluateConfig

evaluate = container_component(
    "evaluate",
    EvaluateConfig,
    inputs=["bundle", "student", "profile", "traces"],
    outputs=["scores"],
    html=["report"],
)
