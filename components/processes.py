"""Which of several processes this is, and what they tell each other. torchrun starts them; its environment says so.

Every function is a no-op with one process, so that a stage is written once. What is written, to the store, to MLflow,
to the terminal, is the first process's work; what is drawn is drawn by all of them alike. torch is imported only where
there are several: rooms that only move files ask here as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

Item = TypeVar("Item")

_together = False


def started() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def joined() -> Iterator[None]:
    """Within the block the processes that torchrun started know each other: over gloo, and over nccl between GPUs."""
    global _together
    if started() == 1:
        yield
        return
    import torch.distributed as dist
    from torch.cuda import is_available

    dist.init_process_group("cpu:gloo,cuda:nccl" if is_available() else "gloo")
    _together = True
    try:
        yield
    finally:
        _together = False
        dist.destroy_process_group()


def count() -> int:
    """How many processes work together."""
    return started() if _together else 1


def rank() -> int:
    """Which of them this is, from 0."""
    return int(os.environ["RANK"]) if _together else 0


def local_rank() -> int:
    """Which of them on this machine."""
    return int(os.environ.get("LOCAL_RANK", "0")) if _together else 0


def started_here() -> int:
    """How many of them torchrun started on this machine, which share its memory; 1 without it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this process is the one that writes."""
    return rank() == 0


def share(items: Sequence[Item]) -> Sequence[Item]:
    """This process's part: every `count`-th, so that items sorted by length are dealt evenly."""
    return items[rank() :: count()]


def gathered(value: Item) -> list[Item]:
    """What every process gives, in their order, at every process."""
    if not _together:
        return [value]
    from torch.distributed import all_gather_object

    values: list[Any] = [None] * count()
    all_gather_object(values, value)
    return values


def told(value: Item) -> Item:
    """What the first process gives, at every process."""
    if not _together:
        return value
    from torch.distributed import broadcast_object_list

    values: list[Any] = [value]
    broadcast_object_list(values, src=0)
    return values[0]


def joined_shares(own: Sequence[Item]) -> list[Item]:
    """The whole whose `share` each process gives, in the order that it had."""
    parts = gathered(own)
    return [parts[i % len(parts)][i // len(parts)] for i in range(sum(map(len, parts)))]
