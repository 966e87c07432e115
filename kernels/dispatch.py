"""Where Triton kernels run. Which code an op runs follows from the device of its tensors alone."""

from __future__ import annotations

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton was asked to run kernels on the CPU, in its interpreter: for tests, a millisecond a program."""

DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)
"""What kernels compute with; the interpreter multiplies bfloat16 wrongly."""


def on_triton(device: torch.device) -> bool:
    """Whether kernels run on tensors of the device: a GPU, or the CPU where the interpreter was asked for."""
    return device.type == "cuda" or INTERPRETED
