"""What the activations of one site look like at one stretch of positions, and the main scale that suits them.

Shapes: N tokens, D channels.
"""

from __future__ import annotations

import torch

from reflux.kernels.dual_scale_quant import dual_scale_quant, largest_code

CANDIDATE_QUANTILES = (0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 1.0)
"""Quantiles of |x| tried as the end of the main grid."""


class SiteStatistics:
    """Running extremes over all tokens of a bucket, and a sample of tokens for everything that needs the values."""

    def __init__(self) -> None:
        self.tokens, self.square_sum, self.absmax, self.token_absmax_sum = 0, 0.0, 0.0, 0.0
        self.samples: list[torch.Tensor] = []

    def update(self, x_ND: torch.Tensor, sample_N: torch.Tensor) -> None:
        """Count all N tokens and keep those that `sample_N` names."""
        token_absmax_N = x_ND.abs().amax(-1)
        self.tokens += len(x_ND)
        self.square_sum += x_ND.double().pow(2).mean(-1).sum().item()
        self.absmax = max(self.absmax, token_absmax_N.max().item())
        self.token_absmax_sum += token_absmax_N.double().sum().item()
        self.samples.append(x_ND[sample_N].clone())

    @property
    def rms(self) -> float:
        return (self.square_sum / self.tokens) ** 0.5

    @property
    def token_absmax_mean(self) -> float:
        """Mean over tokens of the largest |x|: where a dynamic outlier grid usually ends."""
        return self.token_absmax_sum / self.tokens

    def sample(self) -> torch.Tensor:
        return torch.cat(self.samples)


def best_main_scale(x_ND: torch.Tensor, bits: int) -> float:
    """The main scale, among CANDIDATE_QUANTILES, under which dual-scale rounding has the least squared error."""
    magnitude = x_ND.abs().flatten().sort().values
    candidates = [
        magnitude[round(q * (len(magnitude) - 1))].clamp(min=1e-3) / largest_code(bits) for q in CANDIDATE_QUANTILES
    ]
    errors = [
        (dual_scale_quant(x_ND, scale.expand(len(x_ND), 1), bits) - x_ND).pow(2).sum().item() for scale in candidates
    ]
    return candidates[errors.index(min(errors))].item()


def kurtosis(x: torch.Tensor) -> float:
    """Fourth standardised moment; 3 for a Gaussian, 0 for a constant."""
    centred = x.double().flatten() - x.double().mean()
    variance = centred.pow(2).mean()
    return (centred.pow(4).mean() / variance.pow(2)).item() if variance > 0 else 0.0


def sarle_bimodality(x: torch.Tensor) -> float:
    """(skewness² + 1) / kurtosis, in (0, 1]; 5/9 for a uniform distribution, more suggests two modes (Sarle). 0 for a
    constant.
    """
    centred = x.double().flatten() - x.double().mean()
    variance = centred.pow(2).mean()
    if variance == 0:
        return 0.0
    skewness = centred.pow(3).mean() / variance.pow(1.5)
    return ((skewness.pow(2) + 1) / (centred.pow(4).mean() / variance.pow(2))).item()
