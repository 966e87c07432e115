"""Parameters of merge_traces: there are none, the parts say everything."""

from __future__ import annotations

from dataclasses import dataclass

STAGE_VERSION = "1"


@dataclass(frozen=True, kw_only=True)
class MergeTracesConfig:
    """Make one artifact of the parts in which collect_traces answered the prompts. Nothing is copied."""
