"""Every launch that a dispatch can make compiles for every GPU we name, without a GPU: no spills, and a block fits into
shared memory and registers.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from reflux.kernels import lm_head_tiles
from reflux.kernels.chunked_jsd import kernel as chunked_jsd
from reflux.kernels.dual_scale_quant import kernel as dual_scale_quant
from reflux.kernels.topk_kl import kernel as topk_kl

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
REGISTERS = {"cuda": 2**16 // 32, "hip": 4 * 512}
"""That one thread of every warp together may take: a multiprocessor's, or those of a compute unit's four SIMDs."""
LEAST_WARPS = {"dual_scale_quant": 16}
"""That have to fit at once, where an operation waits for memory: while some wait others work."""
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32"}
EVEN = ("_ptr", "_row", "width", "part")
"""Ends of the names of what is a multiple of 16 for nearly all models."""
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A kernel as its launcher would ask for it."""

    function: Any
    pointers: dict[str, torch.dtype]
    """Of the arguments that end in _ptr and are not float32."""
    constants: dict[str, Any]
    """Of the function's arguments; its others are 32-bit numbers."""
    options: dict[str, Any]
    floats: tuple[str, ...] = ()
    aligned: bool = True
    """Whether Triton is told so of what EVEN names."""

    def compiled(self, target: GPUTarget) -> CompiledKernel:
        names = self.function.arg_names
        constants = {name: value for name, value in self.constants.items() if name in names}
        signature = {name: "constexpr" if name in constants else self._type(name) for name in names}
        even = [i for i, n in enumerate(names) if n not in constants and n.endswith(EVEN) and n != "upstream_row"]
        attributes = {(i,): [["tt.divisibility", 16]] for i in even} if self.aligned else {}
        source = ASTSource(fn=self.function, signature=signature, constexprs=constants, attrs=attributes)
        return triton.compile(source, target=target, options=self.options)

    def _type(self, name: str) -> str:
        if name.endswith("_ptr"):
            return POINTERS[self.pointers.get(name, torch.float32)]
        return "fp32" if name in self.floats else "i32"


def dual_scale_launches() -> Iterator[tuple[str, Launch]]:
    for function in (dual_scale_quant.forward_kernel, dual_scale_quant.backward_kernel):
        for channels, dtype, scale in (
            (63, torch.float32, torch.float32),
            (576, torch.float16, torch.float16),
            (1536, torch.bfloat16, torch.bfloat16),
            (1536, torch.bfloat16, torch.float32),
            (8192, torch.float32, torch.float32),
        ):
            options = dict(dual_scale_quant.launch_options(channels))
            constants = {"TOP": 7, "BLOCK": options.pop("BLOCK")}
            if channels != 63:  # which stand for a view with any stride
                constants |= {"x_column": 1, "grad_column": 1}
            pointers = dict.fromkeys(("x_ptr", "values_ptr", "grad_ptr"), dtype)
            pointers |= dict.fromkeys(("main_scale_ptr", "grad_scale_ptr"), scale)
            launch = Launch(
                function=function, pointers=pointers, constants=constants, options=options, aligned=channels != 63
            )
            beside = f" beside {_word(scale)}" if scale != dtype else ""
            yield f"dual_scale_quant.{function.__name__} {channels}{beside}", launch


def lm_head_launches(*, hip: bool) -> Iterator[tuple[str, Launch]]:
    """Both ops that stream an lm_head: all they multiply, with and without a soft cap, of any layout, and a student in
    another type than its teacher.
    """
    of_student, of_teacher = ("hidden_ptr", "weight_ptr", "gradient_ptr"), ("teacher_ptr", "teacher_weight_ptr")
    columns = ("hidden_column", "weight_column", "teacher_column", "teacher_weight_column")
    floats = ("scale", "soft_cap", "teacher_scale", "teacher_soft_cap")
    floats += ("log_share", "log_rest", "of_teacher", "of_student")
    functions = (
        (lm_head_tiles.tile_options, topk_kl.buckets_kernel),
        (lm_head_tiles.tile_options, topk_kl.gradient_kernel),
        (chunked_jsd.pair_options, chunked_jsd.value_kernel),
        (chunked_jsd.pair_options, chunked_jsd.gradient_kernel),
    )
    for options_for, function in functions:
        types = [
            (torch.bfloat16, torch.bfloat16, True, True, False),
            (torch.float16, torch.float16, False, False, False),
            (torch.float32, torch.float32, True, False, False),
            (torch.float32, torch.float32, False, True, True),
        ]
        if options_for is chunked_jsd.pair_options:
            types.append((torch.float32, torch.bfloat16, True, True, True))
        for dtype, student, capped, aligned, tf32 in types:
            asked = options_for(dtype, aligned=aligned, hip=hip) | ({"PRECISION": "tf32"} if tf32 else {})
            constants = {name: value for name, value in asked.items() if name.isupper()}
            constants |= {"CAPPED": capped, "TEACHER_CAPPED": capped} | (dict.fromkeys(columns, 1) if aligned else {})
            op = function.__module__.split(".")[-2]
            words = [_word(student), "capped" * capped, "any layout" * (not aligned), "tf32" * tf32]
            words.append(f"beside {_word(dtype)}" * (student != dtype))
            yield (
                " ".join([f"{op}.{function.__name__}", *filter(None, words)]),
                Launch(
                    function=function,
                    pointers=dict.fromkeys(of_student, student)
                    | dict.fromkeys(of_teacher, dtype)
                    | {"ids_ptr": torch.int32},
                    constants=constants,
                    options={name: value for name, value in asked.items() if name.islower()},
                    floats=floats,
                    aligned=aligned,
                ),
            )


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def launches(target: GPUTarget) -> dict[str, Launch]:
    return dict(dual_scale_launches()) | dict(lm_head_launches(hip=target.backend == "hip"))


def registers(target: GPUTarget, binary: CompiledKernel, folder: Path) -> tuple[int, int]:
    """Of a thread, and bytes of them that went to memory, by the vendor's own count."""
    if target.backend == "hip":
        names = ("vgpr_count", "private_segment_fixed_size")
        used, spilled = (int(re.search(rf"\.{name}:\s*(\d+)", binary.asm["amdgcn"]).group(1)) for name in names)
        return used, spilled
    (folder / "kernel.cubin").write_bytes(binary.asm["cubin"])
    report = subprocess.run(
        [CUOBJDUMP, "--dump-resource-usage", folder / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stdout
    used, *spilled = map(int, re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", report).groups())
    return used, sum(spilled)


@pytest.mark.parametrize("name", launches(GPUTarget("cuda", 80, 32)))
@pytest.mark.parametrize("target", SHARED_KIB, ids=lambda target: str(target.arch))
def test_compiles(target: GPUTarget, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))  # nothing compiled earlier counts
    binary = launches(target)[name].compiled(target)
    used, spilled = registers(target, binary, tmp_path)
    assert spilled == 0
    warps = max(binary.metadata.num_warps, LEAST_WARPS.get(name.partition(".")[0], 0))
    assert used * warps <= REGISTERS[target.backend]
    assert binary.metadata.shared <= SHARED_KIB[target] * 1024
    if target.backend == "cuda" and name.startswith("dual_scale_quant"):  # what makes values equal to the reference
        assert "div.rn.f32" in binary.asm["ptx"]
        assert not re.search(r"\bfma\.rn|div\.full|rcp\.approx", binary.asm["ptx"])
    if target.backend == "cuda" and "16" in name:
        assert re.search(r"\bmma\.sync|wgmma|tcgen05\.mma", binary.asm["ptx"])  # the tensor cores are used
