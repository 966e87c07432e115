"""Declares collect_traces: the teacher answers the prompts."""

from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.declare import container_component

collect_traces = container_component("collect_traces", CollectTracesConfig, outputs=["traces"])
