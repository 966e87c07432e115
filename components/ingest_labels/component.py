"""Declares ingest_labels: expert ratings joined to the traces."""

from reflux.components.declare import container_component
from reflux.components.ingest_labels.config import IngestLabelsConfig

ingest_labels = container_component("ingest_labels", IngestLabelsConfig, inputs=["traces"], outputs=["labels"])
