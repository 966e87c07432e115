"""How much memory can be had here: of the machine, or of the container's limit, whichever is less."""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def available_gib() -> float | None:
    """GiB, None where the platform does not say. What the kernel can drop, such as cached files, counts as free."""
    if not MEMINFO.exists():
        return None
    machine = next(
        int(line.split()[1]) * 1024 for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable")
    )
    limit, used = CGROUP / "memory.max", CGROUP / "memory.current"
    if limit.exists() and limit.read_text().strip() != "max":
        machine = min(machine, int(limit.read_text()) - int(used.read_text()))
    return machine / 2**30
