"""Who answers: the model in this process, models on servers, or several of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reflux.components.collect_traces.config import LOCAL, CollectTracesConfig
from reflux.components.collect_traces.teachers.local import local_teacher
from reflux.components.collect_traces.teachers.server import configured_servers, server_teacher
from reflux.components.collect_traces.teachers.teacher import Teacher


def open_teachers(config: CollectTracesConfig, path: Path, digest: str, tokenizer: Any) -> list[Teacher]:
    """One per entry of `answered_by`, in its order; nothing is loaded and nobody called yet."""
    servers = {server.model: server for server in configured_servers(config)}
    return [
        local_teacher(path, digest, tokenizer, config)
        if name == LOCAL
        else server_teacher(servers[name], tokenizer, config)
        for name in config.answered_by
    ]


def teacher_ids(config: CollectTracesConfig, digest: str) -> list[str]:
    """Their ids, which are known without them; `digest` is that of the model in `teacher`."""
    return [digest if name == LOCAL else name for name in config.answered_by]
