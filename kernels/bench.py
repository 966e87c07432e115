"""Time a kernel against its reference: `python -m reflux.kernels.bench dual_scale_quant`.

An op that disagrees with its reference is not timed: a fast wrong answer has no speed. Each op's bench.py says only
what is run (inputs, shapes, providers, tolerance). Without a GPU the reference alone is timed, which says nothing about
the kernel; with TRITON_INTERPRET=1 the kernel runs on the CPU, not for its speed, but for the memory that its launches
ask for, which is that of a GPU. The last line of output is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

import torch
from torch.utils.benchmark import Timer

from .allocations import peak_bytes
from .dispatch import INTERPRETED

Tensors = tuple[torch.Tensor, ...]
Provider = Callable[..., Tensors]
"""Runs the op forward and backward on a case's inputs; returns its values and gradients, in the reference's order."""
Providers = dict[str, Provider | str]
"""By name; a sentence instead of a provider says why it cannot run here."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One size of an op, with its inputs on the device that is measured."""

    name: str
    inputs: Tensors
    arguments: dict[str, Any] = field(default_factory=dict)
    bytes_moved: int
    """What a single pass would read and write, forward and backward: the bound that a speed is compared with."""


def require_agreement(providers: dict[str, Provider], case: Case, *, rtol: float, atol: float) -> None:
    """ValueError naming the provider and the case whose values or gradients differ from those of `reference`."""
    expected = providers["reference"](*case.inputs, **case.arguments)
    for name, provider in providers.items():
        for found, wanted in zip(provider(*case.inputs, **case.arguments), expected, strict=True):
            try:
                torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)
            except AssertionError as error:
                raise ValueError(f"{name} disagrees with the reference on {case.name}, not timed: {error}") from error


def measure(provider: Provider, case: Case, *, min_seconds: float) -> dict[str, float]:
    """Milliseconds of forward and backward together, and the share of bytes_moved that goes by a second."""
    run = {"provider": provider, "inputs": case.inputs, "arguments": case.arguments}
    timer = Timer("provider(*inputs, **arguments)", globals=run, num_threads=torch.get_num_threads())
    times = timer.blocked_autorange(min_run_time=min_seconds).times
    p20, p50, p80 = sorted(quantiles(times * 2, n=10)[i] for i in (1, 4, 7))  # rounding may swap equal ones
    return {"ms_p20": p20 * 1e3, "ms_p50": p50 * 1e3, "ms_p80": p80 * 1e3, "gb_per_s": case.bytes_moved / p50 / 1e9}


def bench(op: Any, device: torch.device, *, min_seconds: float) -> dict[str, Any]:
    """Agreement on all cases first, then times: one row a case and provider. `op` is a module like
    dual_scale_quant/bench.py.
    """
    named, cases = op.providers(device), op.cases(device)
    providers = {name: provider for name, provider in named.items() if not isinstance(provider, str)}
    for case in cases:
        require_agreement(providers, case, rtol=op.RTOL, atol=op.ATOL)
    rows = [
        {"case": case.name, "provider": name} | _measured(provider, case, device, min_seconds)
        for case in cases
        for name, provider in providers.items()
    ]
    absent = {name: provider for name, provider in named.items() if isinstance(provider, str)}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    machine = {"device": name, "torch": torch.__version__, "threads": torch.get_num_threads()}
    return machine | {"rows": rows, "absent": absent}


def _measured(provider: Provider, case: Case, device: torch.device, min_seconds: float) -> dict[str, float]:
    peak = peak_bytes(lambda: provider(*case.inputs, **case.arguments), case.inputs, device)
    times = {} if INTERPRETED else measure(provider, case, min_seconds=min_seconds)
    return {"peak_mb": peak / 1e6} | times


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", help="a folder of kernels/")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--min-seconds", type=float, default=0.5, help="measured at least so long per case")
    options = parser.parse_args(argv)
    op = importlib.import_module(f"reflux.kernels.{options.op}.bench")
    result = {"op": options.op} | bench(op, torch.device(options.device), min_seconds=options.min_seconds)
    for row in result["rows"]:
        speed = "" if INTERPRETED else f"{row['ms_p50']:9.3f} ms  {row['gb_per_s']:8.1f} GB/s"
        print(f"{row['case']:<36} {row['provider']:<10} {row['peak_mb']:9.2f} MB {speed}")
    for name, why in result["absent"].items():
        print(f"{name}: not run, {why}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
