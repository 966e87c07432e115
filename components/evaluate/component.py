"""Declares evaluate: the bundle beside the teacher and the baselines."""

from reflux.components.declare import container_component
from reflux.components.evaluate.config import EvaluateConfig

evaluate = container_component(
    "evaluate", EvaluateConfig, inputs=["bundle", "student", "profile", "traces"], outputs=["scores"],
    html={"report": "report.html"}, ends_run=True, registers="bundle",
)  # fmt: skip
