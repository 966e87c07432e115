"""What torch's allocator took of a GPU while it trained: `reflux doctor` tells from it whether memory is fragmented."""

from __future__ import annotations

import torch


def gpu_memory(device: torch.device) -> dict[str, int] | None:
    """Peaks of what tensors held and of what was taken for them, bytes, and how often the allocator had to give back
    what it held and ask again. None where the device is no GPU.
    """
    if device.type != "cuda":
        return None
    stats = torch.cuda.memory_stats(device)
    return {
        "bytes_allocated": stats["allocated_bytes.all.peak"],
        "bytes_reserved": stats["reserved_bytes.all.peak"],
        "retries": stats["num_alloc_retries"],
    }
