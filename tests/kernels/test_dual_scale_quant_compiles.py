"""Every launch that the dispatch can make compiles for every GPU we name, without a GPU: no spills, and it fits."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from reflux.kernels.dual_scale_quant import kernel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
]

SHARED_KIB = {  # shared memory of one block, CUDA programming guide and AMD CDNA3 ISA
    GPUTarget("cuda", 80, 32): 163,  # A100
    GPUTarget("cuda", 89, 32): 99,  # L4, L40S
    GPUTarget("cuda", 90, 32): 227,  # H100, H200
    GPUTarget("cuda", 100, 32): 227,  # B200
    GPUTarget("hip", "gfx942", 64): 64,  # MI300
}
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def compiled(target: GPUTarget, function: Any, dtype: torch.dtype, channels: int) -> CompiledKernel:
    """The kernel as the launcher would ask for it, for contiguous tokens of `channels` values at 4 bits."""
    options = dict(kernel.launch_options(channels))
    constants = {"TOP": 7, "BLOCK": options.pop("BLOCK"), "x_column": 1, "grad_column": 1}
    constants = {name: value for name, value in constants.items() if name in function.arg_names}
    signature = {
        name: "constexpr"
        if name in constants
        else "*fp32"
        if name == "outlier_scale_ptr"
        else POINTERS[dtype]
        if name.endswith("_ptr")
        else "i32"
        for name in function.arg_names
    }
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    return triton.compile(source, target=target, options=options)


def spilled_bytes(target: GPUTarget, binary: CompiledKernel, folder: Path) -> int:
    """Bytes of registers that went to memory, by the vendor's own count."""
    if target.backend == "hip":
        return int(re.search(r"\.private_segment_fixed_size:\s*(\d+)", binary.asm["amdgcn"]).group(1))
    (folder / "kernel.cubin").write_bytes(binary.asm["cubin"])
    report = subprocess.run(
        [CUOBJDUMP, "--dump-resource-usage", folder / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stdout
    return sum(int(n) for n in re.search(r"STACK:(\d+) .*?LOCAL:(\d+)", report).groups())


@pytest.mark.parametrize("channels", [63, 576, 1536, 8192])
@pytest.mark.parametrize("name", ["forward_kernel", "backward_kernel"])
@pytest.mark.parametrize("target", SHARED_KIB, ids=lambda target: str(target.arch))
def test_compiles(target: GPUTarget, name: str, channels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))  # nothing compiled earlier counts
    dtype = {63: torch.float32, 576: torch.float16, 1536: torch.bfloat16, 8192: torch.float32}[channels]
    binary = compiled(target, getattr(kernel, name), dtype, channels)
    assert spilled_bytes(target, binary, tmp_path) == 0
    assert binary.metadata.shared <= SHARED_KIB[target] * 1024
    if target.backend == "cuda":  # what makes values equal to the reference
        assert "div.rn.f32" in binary.asm["ptx"]
        assert not re.search(r"\bfma\.rn|div\.full|rcp\.approx", binary.asm["ptx"])
