"""Declares merge_traces: the parts of the traces become one artifact."""

from reflux.components.declare import container_component
from reflux.components.merge_traces.config import MergeTracesConfig

merge_traces = container_component(
    "merge_traces", MergeTracesConfig, inputs=["parts"], outputs=["traces"], several=["parts"]
)
