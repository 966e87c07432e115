"""Declares brew."""

from reflux.components.declare import container_component
from toy_stages.brew.config import BrewConfig

brew = container_component("toy_stages.brew", BrewConfig, outputs=["tea"])
