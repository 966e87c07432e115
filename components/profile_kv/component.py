"""Declares profile_kv: what the traces cost in KV cache, and the first position table."""

from reflux.components.declare import container_component
from reflux.components.profile_kv.config import ProfileKvConfig

profile_kv = container_component(
    "profile_kv", ProfileKvConfig, inputs=["traces"], outputs=["profile"], html={"plots": "profile.html"}
)
