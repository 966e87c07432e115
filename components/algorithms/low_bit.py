"""Turn a causal language model into its low-bit form: the one forward that is trained, rolled out, exported and
evaluated.

Every linear of the decoder layers rounds its weight; four sites per layer round the activations that feed those
linears; layer_bits.py tells which has other bits than the rest. Embedding and lm_head may have 8 bits
(low_bit_embedding.py), norms stay in full precision. Works for decoders with `self_attn` and `mlp` blocks (Llama, Qwen,
Mistral and their kin).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

import torch
from torch import nn

from .hadamard import NO_ROTATION, check_rotation, rotate, turn_down_inputs
from .kv_cache import round_cache
from .kv_forms import FULL_CACHE, check_kv_cache
from .layer_bits import FULL_PRECISION, SITES, TERNARY, bits_of, concern_sites, parsed, require_used
from .low_bit_embedding import check_embedding_bits, require_grids, require_tables, round_embedding
from .policies import PositionTable
from .quantizers import QUANTIZERS, check_group_size, fake_quantize_weight, require_grid, zero_points
from .rope_tables import check_rope_bits, round_rope

FIRST_FIELDS = ("weight_bits", "group_size", "activation_bits", "activation")
"""Of a scheme; the others came later."""


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a model is quantised; its digest says whether two models are quantised alike."""

    weight_bits: int = 4
    group_size: int = 64
    activation_bits: int = 4
    activation: str = "dual"
    exceptions: tuple[str, ...] = ()
    """Layers and sites of other bits, as layer_bits.py reads them."""
    zero_points: bool = False
    """Whether a group of weights has a zero point, so that its grid spans its smallest to its largest weight."""
    kv_cache: str = FULL_CACHE
    """Form in which keys and values are cached, one of kv_forms.KV_FORMS."""
    rope_bits: int = FULL_PRECISION
    """Bits of the rotary tables, 8 or not rounded."""
    rotation: str = NO_ROTATION
    """Whether the model is turned by a Hadamard matrix before its weights are rounded (hadamard.py)."""
    embedding_bits: int = FULL_PRECISION
    """Of embedding and lm_head, 8 or not rounded."""

    def __post_init__(self) -> None:
        if self.activation not in QUANTIZERS:
            raise ValueError(f"activation {self.activation!r}: allowed are {sorted(QUANTIZERS)}")
        for name in ("weight_bits", "activation_bits"):
            if getattr(self, name) not in (*range(2, 9), FULL_PRECISION):
                raise ValueError(
                    f"{name} {getattr(self, name)}: allowed are 2 to 8, or {FULL_PRECISION} for not quantised"
                )
        if self.group_size < 1:
            raise ValueError(f"group_size {self.group_size}: must be at least 1")
        for exception in self.exceptions:
            parsed(exception)
        check_kv_cache(self.kv_cache)
        check_rope_bits(self.rope_bits)
        check_rotation(self.rotation)
        check_embedding_bits(self.embedding_bits)
        if self.rotates and self.needs_policy:
            raise ValueError(
                f"rotation {self.rotation!r}: activation 'dual' takes its scales from a table that was profiled before "
                "any rotation; take 'plain'"
            )

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """The scheme that `as_json` described. ValueError for a field that this version does not have."""
        if unknown := sorted(values.keys() - {field.name for field in fields(cls)}):
            raise ValueError(f"scheme: {unknown[0]!r} is not known here, another version of reflux wrote it")
        return cls(**{**values, "exceptions": tuple(values.get("exceptions", ()))})

    def as_json(self) -> dict[str, Any]:
        """What is stored and digested: the first fields, and of those that came later what is not their default, so
        that schemes from before them keep their digests.
        """
        unset = {f.name for f in fields(self) if f.name not in FIRST_FIELDS and getattr(self, f.name) == f.default}
        values = {**asdict(self), "exceptions": list(self.exceptions)}
        return {name: value for name, value in values.items() if name not in unset}

    @property
    def quantizes_activations(self) -> bool:
        """Whether any site rounds what passes."""
        return min([self.activation_bits, *concern_sites(self.exceptions)]) < FULL_PRECISION

    def weights_only(self) -> Self:
        """The same weights, and activations in full precision."""
        exceptions = self.exceptions
        if concern_sites(exceptions):
            exceptions = (*exceptions, *(f"{site}={FULL_PRECISION}" for site in SITES))
        return replace(
            self,
            activation_bits=FULL_PRECISION,
            exceptions=exceptions,
            kv_cache=FULL_CACHE,
            rope_bits=FULL_PRECISION,
        )

    def has_zero_points(self, bits: int) -> bool:
        """Whether weights of so many bits have them: a ternary grid is symmetric in any scheme."""
        return self.zero_points and bits != TERNARY

    @property
    def needs_policy(self) -> bool:
        return self.quantizes_activations and self.activation == "dual"

    @property
    def rotates(self) -> bool:
        return self.rotation != NO_ROTATION

    @property
    def rounds_embedding(self) -> bool:
        return self.embedding_bits < FULL_PRECISION

    def digest(self) -> str:
        """sha256 of the configuration."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()


class LowBitLinear(nn.Module):
    """A linear layer whose weight is rounded in every forward; `frozen_OI` holds the rounded weight while it cannot
    change. `log_clip_OG` says per group where the grid ends, as the log of a share of the largest |w|: 0 until it is
    trained. `zero_OG` are zero points that a training began with; None: those of the weights. `adapter`, if there is
    one, is asked for what it adds to the weight before that is rounded.
    """

    zero_OG: torch.Tensor | None

    def __init__(self, linear: nn.Linear, bits: int, group_size: int, has_zero_points: bool) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bits, self.group_size, self.has_zero_points = bits, group_size, has_zero_points
        groups = (linear.out_features, linear.in_features // group_size)
        self.log_clip_OG = nn.Parameter(torch.zeros(groups, dtype=self.weight.dtype, device=self.weight.device))
        self.register_buffer("zero_OG", None)
        self.frozen_OI: torch.Tensor | None = None
        self.adapter: Any = None

    def latent(self) -> torch.Tensor:
        """[O, I] the weight in full precision, with the adapter's share: what is exported as master weight."""
        return self.weight if self.adapter is None else self.weight + self.adapter.delta()

    def rounded(self) -> torch.Tensor:
        latent_OI = self.latent()
        zero_OG = self.zero_OG
        if zero_OG is None and self.has_zero_points:
            zero_OG = zero_points(latent_OI.detach(), self.bits, self.group_size)
        return fake_quantize_weight(latent_OI, self.bits, self.group_size, self.log_clip_OG, zero_OG)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.rounded() if self.frozen_OI is None else self.frozen_OI, self.bias)


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder layers of a causal language model. ValueError if it is built otherwise."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"{type(model).__name__}: reflux quantises decoders that keep their layers in model.layers")
    return layers


def site_modules(model: Any) -> dict[str, nn.Module]:
    """Site name ('layers.3.mlp_in') -> the module whose input is rounded there."""
    return {
        f"layers.{i}.{name}": layer.get_submodule(path)
        for i, layer in enumerate(decoder_layers(model))
        for name, path in SITES.items()
    }


def bits_of_weights(model: Any, scheme: Scheme) -> dict[str, int]:
    """Linear of the decoder layers ('layers.3.mlp.down_proj') -> bits of its weight; FULL_PRECISION where it is not
    rounded.
    """
    names = [
        f"layers.{name}" for name, module in decoder_layers(model).named_modules() if hasattr(module, "in_features")
    ]
    return {name: bits_of(name, scheme.weight_bits, scheme.exceptions) for name in names}


def bits_of_sites(model: Any, scheme: Scheme) -> dict[str, int]:
    """Site ('layers.3.mlp_in') -> bits of its activations; FULL_PRECISION where they are not rounded."""
    return {site: bits_of(site, scheme.activation_bits, scheme.exceptions) for site in site_modules(model)}


def require_fitting(model: Any, scheme: Scheme) -> None:
    """ValueError for an exception that fits no layer of the model, a low-bit layer that does not divide into groups, or
    an embedding that is to be rounded and is no plain table; the model may be on the meta device.
    """
    of_weights = bits_of_weights(model, scheme)
    if scheme.rounds_embedding:
        require_tables(model)
    require_used(scheme.exceptions, [*of_weights, *bits_of_sites(model, scheme)])
    for name, bits in of_weights.items():
        if bits < FULL_PRECISION:
            check_group_size(scheme.group_size, model.model.get_submodule(name).in_features, name)


def apply_scheme(model: Any, scheme: Scheme, policy: PositionTable | None = None, *, on_the_grid: bool = False) -> Any:
    """Quantise `model` in place and return it. The policy becomes `model.policy`, so that its parameters travel with
    the model. `on_the_grid`: its weights are turned and rounded already, and only activations are.

    ValueError, and an unchanged model, if the scheme needs a policy and has none, the policy does not know a site of
    the model, a layer does not divide into groups or has weights that no grid holds, or an exception fits no layer.
    """
    layers, of_sites = decoder_layers(model), bits_of_sites(model, scheme)
    require_fitting(model, scheme)
    if scheme.needs_policy and policy is None:
        raise ValueError("activation 'dual' needs a policy table: take the one that profile_kv wrote")
    unknown = [site for site in site_modules(model) if policy is not None and site not in policy.index]
    if scheme.quantizes_activations and unknown:
        raise ValueError(f"policy table has no site {unknown[0]!r}: it was made for another model")
    if not on_the_grid:
        rounded = {name: bits for name, bits in bits_of_weights(model, scheme).items() if bits < FULL_PRECISION}
        linears: dict[str, Any] = {name: layers.get_submodule(name.removeprefix("layers.")) for name in rounded}
        for name, linear in linears.items():
            require_grid(linear.weight, rounded[name], scheme.group_size, name, scheme.has_zero_points(rounded[name]))
        if scheme.rounds_embedding:
            require_grids(model)
        if scheme.rotates:
            rotate(model)
        if scheme.rounds_embedding:
            round_embedding(model)
        for name, linear in linears.items():
            low_bit = LowBitLinear(linear, rounded[name], scheme.group_size, scheme.has_zero_points(rounded[name]))
            layers.set_submodule(name.removeprefix("layers."), low_bit)
    model.policy, model.rounds_activations = policy, True
    if scheme.rotates:
        turn_down_inputs(model, layers)
    round_attention(model, scheme)
    if scheme.quantizes_activations:
        model.model.register_forward_pre_hook(look_up_scales(policy), with_kwargs=True)
        for site, module in site_modules(model).items():
            if of_sites[site] < FULL_PRECISION:
                rounding = _Rounding(model, site, of_sites[site], scheme.activation)
                module.register_forward_pre_hook(rounding, with_kwargs=True)
    return model


def round_attention(model: Any, scheme: Scheme) -> None:
    """Give `model` the scheme's cache and rotary tables, in effect wherever it rounds activations."""
    if scheme.kv_cache != FULL_CACHE:
        attentions = [layer.get_submodule("self_attn") for layer in decoder_layers(model)]
        round_cache(model, attentions, scheme.kv_cache)
    if scheme.rope_bits < FULL_PRECISION:
        round_rope(model, scheme.rope_bits)


def profiled_table(table: PositionTable, scheme: Scheme, chosen_for: int) -> PositionTable:
    """The table that profile_kv chose for activations of `chosen_for` bits, at the bits that its sites have."""
    bits = {site: bits_of(site, scheme.activation_bits, scheme.exceptions) for site in table.sites}
    return table.for_bits({site: n for site, n in bits.items() if n < FULL_PRECISION}, chosen_for)


@contextmanager
def watching_sites(model: Any, see: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Within the block, `see(site, x_BTD)` is called with the hidden states that reach each site, before any
    rounding.
    """

    def hook(site: str) -> Any:
        def forward(module: nn.Module, args: tuple, kwargs: dict) -> None:
            see(site, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

        return forward

    handles = [
        module.register_forward_pre_hook(hook(site), with_kwargs=True, prepend=True)
        for site, module in site_modules(model).items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Rounding:
    """Forward pre-hook that rounds the hidden states a module receives, by the policy's scale at each token's
    position.
    """

    def __init__(self, model: Any, site: str, bits: int, activation: str) -> None:
        self.model, self.site, self.bits = model, site, bits
        self.quantizer = QUANTIZERS[activation]

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": self.round(kwargs["hidden_states"])}
        return (self.round(args[0]), *args[1:]), kwargs

    def round(self, x_BTD: torch.Tensor) -> torch.Tensor:
        if not self.model.rounds_activations:
            return x_BTD
        policy, scales = self.model.policy, self.model.model.main_scales
        scale_BT1 = None if policy is None else scales[policy.index[self.site]][..., None]
        return self.quantizer(x_BTD, scale_BT1, self.bits)


def look_up_scales(policy: PositionTable | None) -> Any:
    """Forward pre-hook of the decoder: the scales of all sites at this forward's positions, looked up once."""

    def look_up(decoder: Any, args: tuple, kwargs: dict) -> None:
        position_BT = kwargs.get("position_ids")
        if position_BT is None:
            raise ValueError("a low-bit model needs position_ids: its activation scales depend on the position")
        decoder.main_scales = () if policy is None else policy.main_scales(position_BT).unbind()

    return look_up


@contextmanager
def full_precision_activations(model: Any) -> Iterator[None]:
    """Within the block activations are not rounded, nor cache and rotary tables: the W4A16 path of the same weights."""
    before, model.rounds_activations = model.rounds_activations, False
    try:
        yield
    finally:
        model.rounds_activations = before


@contextmanager
def frozen_weights(model: Any, *, differentiable: bool = False, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Round every weight once for all forwards of the block: weights do not change between rollouts, nor between the
    micro-batches of one optimizer step. If `differentiable`, the gradients that the block gathers at the rounded
    weights are carried on to the master weights at its end, once for all micro-batches. `dtype` is that of the rounded
    weights and of their gradients, the master weights' own by default.
    """
    layers = [m for m in model.modules() if isinstance(m, LowBitLinear)]
    before = [layer.frozen_OI for layer in layers]
    try:
        for layer in layers:
            with torch.no_grad():
                rounded_OI = layer.rounded().to(dtype)
            moves = any(p.requires_grad for p in layer.parameters())
            layer.frozen_OI = rounded_OI.requires_grad_(differentiable and moves)
        yield
        for layer in layers:
            grad_OI = None if layer.frozen_OI is None else layer.frozen_OI.grad
            layer.frozen_OI = None  # the next line's gradients take its place: one layer's are in memory twice
            if grad_OI is not None:
                layer.rounded().backward(grad_OI.to(layer.weight.dtype))
    finally:
        for layer, frozen_OI in zip(layers, before, strict=True):
            layer.frozen_OI = frozen_OI
