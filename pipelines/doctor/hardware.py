"""Fourth look: the GPU that the run saw, or that this machine has. Without one there is nothing to find."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import torch

from reflux.components.artifacts import Artifact
from reflux.pipelines.doctor.finding import Finding, NothingToSeeError

NO_GPU = "this machine has no GPU that torch can use"
OLDEST_CAPABILITY = (8, 0)
"""What the low-bit kernels are compiled for and tested from on."""
MOST_UNUSED = 0.25
"""Share of the memory taken from the GPU that may lie between tensors."""
GRAPHS = "TORCHINDUCTOR_CUDAGRAPHS"


def driver_here() -> Finding:
    """Of this machine."""
    if not torch.cuda.is_available():
        raise NothingToSeeError(f"{NO_GPU}; torch is {torch.__version__}")
    version = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]  # only in builds for CUDA
    return driver(version, torch.version.cuda or "0", torch.cuda.get_device_capability())


def driver(version: int, built_for: str, capability: tuple[int, int]) -> Finding:
    """`version` as CUDA tells it (12040 is 12.4), `built_for` torch's CUDA. Of one major version any driver serves."""
    major, minor = version // 1000, version % 1000 // 10
    found = f"driver for CUDA {major}.{minor}, torch for {built_for}, GPU of capability {capability[0]}.{capability[1]}"
    if major < int(built_for.partition(".")[0]):
        fix = f"a driver for CUDA {built_for}, or torch built for {major}"
        return Finding(check="driver", status="fail", found=f"too old: {found}", fix=fix)
    if capability < OLDEST_CAPABILITY:
        fix = "the reference path: hide the GPU with CUDA_VISIBLE_DEVICES="
        oldest = ".".join(map(str, OLDEST_CAPABILITY))
        return Finding(check="driver", status="fail", found=f"kernels need capability {oldest}: {found}", fix=fix)
    return Finding(check="driver", status="ok", found=found)


def memory_of(student: Artifact | None) -> Finding:
    """Of the run that wrote the student."""
    if student is None or not student.shards("gpu_memory.json"):
        raise NothingToSeeError("the run has recorded none: its training is not done, or was not on a GPU")
    return memory(json.loads(student.file("gpu_memory.json")))


def memory(stats: Mapping[str, int]) -> Finding:
    """From bytes_reserved, bytes_allocated (both at their peaks) and retries of torch's allocator."""
    unused = 1 - stats["bytes_allocated"] / max(1, stats["bytes_reserved"])
    taken = f"{stats['bytes_reserved'] / 2**30:.1f} GiB taken, {unused:.0%} of it between tensors"
    found = f"{taken}, {stats['retries']} times given back to make room"
    if stats["retries"] or unused > MOST_UNUSED:
        fix = "fragmented: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, distill.packing=true"
        return Finding(check="gpu memory", status="warn", found=found, fix=fix)
    return Finding(check="gpu memory", status="ok", found=found)


def graphs(environment: Mapping[str, str] = os.environ) -> Finding:
    """Would torch record CUDA graphs, in which a step's shapes and scales stand still?"""
    if environment.get(GRAPHS) == "1":
        found = f"{GRAPHS}=1: whatever torch compiles is recorded as a CUDA graph"
        return Finding(check="CUDA graphs", status="warn", found=found, fix=f"unset {GRAPHS}")
    found = "off: reflux compiles nothing by itself, and the environment asks for none"
    return Finding(check="CUDA graphs", status="ok", found=found)
