"""How much memory can be had here: of the machine, or of the container's limit, whichever is less."""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def available_gib(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> float | None:
    """GiB, None where the platform does not say. What the kernel can drop, such as cached files, counts as free."""
    if not meminfo.exists():
        return None
    machine = next(
        int(line.split()[1]) * 1024 for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable")
    )
    limit = cgroup / "memory.max"
    if limit.exists() and limit.read_text().strip() != "max":
        held = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        cached = int(held["active_file"]) + int(held["inactive_file"])  # a model that was just fetched, say
        used = int((cgroup / "memory.current").read_text()) - cached
        machine = min(machine, int(limit.read_text()) - used)
    return machine / 2**30
