"""What is timed: the activations of one forward and backward at the sites of small models."""

from __future__ import annotations

import torch

from reflux.kernels.bench import Case, Provider, Tensors

from .reference import DualScale

RTOL, ATOL = 1e-3, 1e-3  # the scale's gradient is a sum of up to 8192 terms, in another order
BITS = 4
SIZES = (
    (2048, 576),
    (2048, 1536),
    (8192, 4096),
)  # tokens, channels: SmolLM2-135M's hidden and MLP, an 8B model's hidden


def providers(device: torch.device) -> dict[str, Provider]:
    """Forward and backward of each implementation that runs on the device."""
    found: dict[str, Provider] = {"reference": _provider(DualScale)}
    if device.type == "cuda":
        from .kernel import DualScaleKernel

        found["kernel"] = _provider(DualScaleKernel)
    return found


def cases(device: torch.device) -> list[Case]:
    """SIZES, on a CPU with an eighth of the tokens; in the type that a model of that device computes in."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return [
        _case(tokens if device.type == "cuda" else tokens // 8, channels, device, dtype) for tokens, channels in SIZES
    ]


def _case(tokens: int, channels: int, device: torch.device, dtype: torch.dtype) -> Case:
    generator = torch.Generator(device).manual_seed(0)
    x_ND, upstream_ND = (torch.randn(tokens, channels, generator=generator, device=device) for _ in range(2))
    x_ND[:, ::97] *= 30  # outlier channels
    scale_N1 = torch.full((tokens, 1), 0.3, device=device)
    return Case(
        name=f"{tokens} x {channels} {str(dtype).removeprefix('torch.')}",
        inputs=tuple(t.to(dtype) for t in (x_ND, scale_N1, upstream_ND)),
        arguments={"bits": BITS},
        bytes_moved=4 * tokens * channels * dtype.itemsize,  # read x, write values; read x and the gradient
    )


def _provider(function: type[torch.autograd.Function]) -> Provider:
    def run(x_ND: torch.Tensor, scale_N1: torch.Tensor, upstream_ND: torch.Tensor, *, bits: int) -> Tensors:
        x_ND, scale_N1 = x_ND.detach().requires_grad_(), scale_N1.detach().requires_grad_()
        values_ND = function.apply(x_ND, scale_N1, bits)
        return values_ND, *torch.autograd.grad(values_ND, (x_ND, scale_N1), upstream_ND)

    return run
