"""What a server has to add to a bundle's weights, which it loads by itself: the rounding of what enters each linear.

A server joins layers (q, k and v to one), lays the tokens of all its requests end to end, and tells a layer nothing of
positions. Here are the ways back from its names to sites and from its requests to positions. No server is imported.

Shapes: N tokens of all requests of a forward, R requests, S sites, D channels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from reflux.components.algorithms.layer_bits import SITES
from reflux.components.algorithms.low_bit import Scheme
from reflux.components.algorithms.policies import PositionTable
from reflux.components.algorithms.quantizers import QUANTIZERS
from reflux.components.bundles import policy_table
from reflux.components.bundles.bundle import read_quant_config, read_scheme
from reflux.components.bundles.bundle_digests import require_intact

SERVED = {"weight_bits", "group_size", "activation_bits", "activation", "exceptions", "zero_points"}
"""Parts of a scheme that a server computes: the weights by its own kernels, the activations by what is here."""
_IN_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")


@dataclass(frozen=True, kw_only=True)
class ServedBundle:
    """How a bundle's activations are rounded."""

    scheme: Scheme
    bits: dict[str, int]
    """Of each site that rounds."""
    policy: PositionTable | None

    def main_scales(self, position_N: torch.Tensor) -> torch.Tensor | None:
        """[S, N] of all sites at the tokens' positions; None where scales are the tokens' own."""
        return None if self.policy is None else self.policy.to(position_N.device).main_scales(position_N)

    def rounded(self, site: str, x: torch.Tensor, main_scale_SN: torch.Tensor | None) -> torch.Tensor:
        """x [..., N, D] as the site hands it on, in x's type; steps and codes are in float32 whatever that is."""
        main_scale_N1 = None
        if main_scale_SN is not None and self.policy is not None:
            main_scale_N1 = main_scale_SN[self.policy.index[site]][:, None]
        return QUANTIZERS[self.scheme.activation](x.float(), main_scale_N1, self.bits[site]).to(x.dtype)


def read_served(folder: Path) -> ServedBundle:
    """ValueError if the folder is no bundle, was changed, or has a part that a server would leave out in silence."""
    config, scheme = read_quant_config(folder), read_scheme(folder)
    if left_out := sorted(scheme.as_json().keys() - SERVED):
        raise ValueError(
            f"{folder}: its scheme has {', '.join(left_out)}, which reflux does not compute in a server; load it with "
            "transformers (docs/bundle.md)"
        )
    require_intact(folder, config["files"])
    table = policy_table.decode((folder / "policy_table.bin").read_bytes()) if scheme.needs_policy else None
    bits = {site: entry["bits"] for site, entry in config["activations"].items()}
    return ServedBundle(scheme=scheme, bits=bits, policy=table)


def site_of(name: str) -> str | None:
    """The site whose values enter the linear layer of that name, as 'model.layers.3.self_attn.qkv_proj'; None outside
    the decoder layers. ValueError for one inside them that no site feeds.
    """
    found = _IN_LAYER.search(name)
    if found is None:
        return None
    layer, path = found.groups()
    holding = {site: block for site, block in SITES.items() if path == block or path.startswith(f"{block}.")}
    if not holding:
        raise ValueError(f"{name}: stands in no block whose activations reflux rounds; blocks are {[*SITES.values()]}")
    return f"layers.{layer}.{max(holding, key=lambda site: len(holding[site]))}"


def token_positions(query_start: torch.Tensor, seq_len_R: torch.Tensor, tokens: int) -> torch.Tensor:
    """[N] position of each of the forward's `tokens` in its own request.

    Request r brings the tokens from query_start[r] to query_start[r + 1], the last ones of seq_len_R[r]; those before
    them lie in the cache. What pads the forward behind the last request gets some position.
    """
    requests = len(seq_len_R)
    index_N, start = torch.arange(tokens, device=seq_len_R.device), query_start.long()
    begin_R, end_R = start[:requests], start[1 : requests + 1]
    request_N = torch.searchsorted(end_R.contiguous(), index_N, right=True).clamp(max=requests - 1)
    cached_R = seq_len_R - (end_R - begin_R)
    return index_N - begin_R[request_N] + cached_R[request_N]


def require_possible(*, enforce_eager: bool, tensor_parallel: int, rounds_again: bool) -> None:
    """ValueError for what a server of a bundle must not do.

    `rounds_again`: its kernels for 4-bit weights round activations themselves.
    """
    if not enforce_eager:
        raise ValueError(
            "reflux: start vLLM with --enforce-eager; a recorded graph keeps the positions of its recording, on which "
            "scales depend"
        )
    if tensor_parallel > 1:
        raise ValueError(
            f"reflux: --tensor-parallel-size {tensor_parallel}: an outlier scale is of the whole token, of which each "
            "process would see a part; take 1"
        )
    if rounds_again:
        raise ValueError(
            "reflux: VLLM_CPU_INT4_W4A8 1: on this CPU (AMX) vLLM would round activations to 8 bits once more; set it "
            "to 0"
        )
