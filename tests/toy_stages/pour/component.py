"""Declares pour."""

from reflux.components.declare import container_component
from toy_stages.pour.config import PourConfig

pour = container_component(
    "toy_stages.pour",
    PourConfig,
    registers="tea",
    inputs=["tea"],
    outputs=["cup"],
    html={"report": "report.html"},
    ends_run=True,
)
