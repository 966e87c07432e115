"""vLLM's quantization method `reflux`: vLLM's own kernels for a bundle's packed weights, behind rounded activations.

A bundle's weights are described in compressed-tensors' terms, which vLLM loads and multiplies. What that schema has no
words for, the rounding at each site by the token's position, is put before every layer's kernel. The position is that
of the token in its request, from what the forward's attention metadata say of the requests; so batches of several
requests, chunks of a prompt and cached prefixes have the scales that they were trained with.

Imported by vllm_plugin.py where vLLM is. Tried with vLLM 0.32.0. Shapes: N tokens of all requests, S sites.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.forward_context import ForwardContext, get_forward_context
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.platforms import current_platform

from .served_bundle import ServedBundle, read_served, require_possible, site_of, token_positions

METHOD = "reflux"
_SCALES = "reflux_main_scales"
"""Where a forward keeps what its first layer has looked up for all of them."""


@register_quantization_config(METHOD)
class BundleConfig(CompressedTensorsConfig):
    """The weights as compressed-tensors has them; `bundle` is read from the model's folder."""

    bundle: ServedBundle

    def get_name(self) -> str:
        return METHOD

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["quant_config.json"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Of config.json, or where all weights are in full precision, so that it says nothing, of quant_config.json."""
        if "config_groups" not in config:
            config = {"config_groups": {}, "ignore": ["re:.*"], "format": "dense"}
        return super().from_config(config)

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None) -> Any:
        """What config.json names is taken for this method where the user asks for it, and only there."""
        return METHOD if user_quant == METHOD else None

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        super().maybe_update_config(model_name, hf_config, revision)
        self.bundle = read_served(Path(model_name))

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        method = super().get_quant_method(layer, prefix)
        site = site_of(prefix) if isinstance(layer, LinearBase) else None
        if site not in self.bundle.bits:
            return method
        config = get_current_vllm_config()
        require_possible(
            enforce_eager=config.model_config.enforce_eager,
            tensor_parallel=config.parallel_config.tensor_parallel_size,
            rounds_again=current_platform.is_cpu() and envs.VLLM_CPU_INT4_W4A8 and torch.cpu._is_amx_tile_supported(),
        )
        return RoundedInput(method, self.bundle, site)


@register_weight_loader_v2_supported_method
class RoundedInput(LinearMethodBase):
    """Another linear method, behind a site's rounding."""

    def __init__(self, inner: Any, bundle: ServedBundle, site: str) -> None:
        self.inner, self.bundle, self.site = inner, bundle, site

    def create_weights(self, layer: torch.nn.Module, *sizes: Any, **attributes: Any) -> None:
        self.inner.create_weights(layer, *sizes, **attributes)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.inner.process_weights_after_loading(layer)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        main_scale_SN = _main_scales(self.bundle, get_forward_context(), x.shape[-2], x.device)
        return self.inner.apply(layer, self.bundle.rounded(self.site, x, main_scale_SN), bias)


def _main_scales(
    bundle: ServedBundle, forward: ForwardContext, tokens: int, device: torch.device
) -> torch.Tensor | None:
    """[S, N] of this forward."""
    kept = forward.additional_kwargs
    if _SCALES not in kept:
        kept[_SCALES] = bundle.main_scales(_positions(forward, tokens).to(device))
    return kept[_SCALES]


def _positions(forward: ForwardContext, tokens: int) -> torch.Tensor:
    """[N] of the forward's tokens. ValueError if the attention in use does not say where they stand."""
    metadata = forward.attn_metadata
    if metadata is None:  # vLLM tries how much memory a forward takes; its tokens belong to no request
        return torch.zeros(tokens, dtype=torch.long)
    of_layer = next(iter(metadata.values())) if isinstance(metadata, dict) else metadata
    query_start, seq_len_R = (getattr(of_layer, name, None) for name in ("query_start_loc", "seq_lens"))
    if query_start is None or seq_len_R is None:
        raise ValueError(
            f"reflux: vLLM's {type(of_layer).__name__} does not say at which positions the tokens stand; take an "
            "attention backend that does (FLASH_ATTN, TRITON_ATTN, CPU_ATTN) and no micro-batches"
        )
    return token_positions(query_start, seq_len_R, tokens)
