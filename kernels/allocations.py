"""The most memory that an op holds at once, beside what it was given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(run: Callable[[], Any], given: Iterable[torch.Tensor], device: torch.device) -> int:
    """Bytes of the tensors alive together at the worst moment of run(), its results among them, those of `given` not.

    On a GPU by its allocator. Elsewhere by looking after each operation of torch: the same number for the same
    operations on any machine, without what an operation takes and frees within itself.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _Alive(given) as alive:
        run()
    return alive.peak


class _Alive(TorchDispatchMode):
    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self.given = {StorageWeakRef(tensor.untyped_storage()) for tensor in given}
        self.made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made[StorageWeakRef(storage)] = storage.nbytes()
        self.made = {reference: size for reference, size in self.made.items() if not reference.expired()}
        self.peak = max(self.peak, sum(size for reference, size in self.made.items() if reference not in self.given))
        return result
