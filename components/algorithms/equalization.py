"""Equalise the channels of a model before it is quantised, so that one step of a grid suits more of them.

For any s > 0, W x = (W S)(S^-1 x): a norm or linear layer that makes x takes S^-1, those that read it take S, and what
the model computes does not change. SmoothQuant (arXiv 2211.10438, eq. 4) chooses s by the largest values and AWQ (arXiv
2306.00978, eq. 5) by a search. Here it has a closed form. The step of a token's grid grows with the root mean square of
its values, so what their rounding adds to the output has a power proportional to (sum rms_c^2 / s_c^2) (sum s_c^2
w_c^2), rms_c the root mean square of channel c and w_c the norm of the weights that read it; what the weights' rounding
adds has the same. By Cauchy-Schwarz it is least at s_c = (rms_c / w_c)^(1/2), and there it is cos^2 of the angle
between the two vectors times what it was.

Shapes: B sequences, T tokens, N valid tokens, C channels of a site.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from .low_bit import decoder_layers
from .same_function import same_function

LEAST_NOISE = 0.5
"""The power of rms / w that is derived above."""
FIRST_POSITION = 4
"""Earlier tokens do not count: attention sinks are a hundred times as large as all later ones."""
SMALLEST_SHARE = 1e-3
"""Of their mean over channels, that rms and w are at least: a channel that is never used keeps a scale."""

MAKER = {
    "attn_in": "input_layernorm", "o_in": "self_attn.v_proj", "mlp_in": "post_attention_layernorm",
    "down_in": "mlp.up_proj",
}  # fmt: skip
"""Site -> the module whose outputs are its channels, or are multiplied into them."""
READERS = {
    "attn_in": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "o_in": ("self_attn.o_proj",),
    "mlp_in": ("mlp.gate_proj", "mlp.up_proj"), "down_in": ("mlp.down_proj",),
}  # fmt: skip


class ChannelPower:
    """Mean square of every channel of every site, over the valid tokens from FIRST_POSITION on."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.tokens: dict[str, int] = defaultdict(int)
        self.counted_BT = torch.zeros(0, dtype=torch.bool)

    def begin(self, mask_BT: Tensor) -> None:
        """The coming batch's valid tokens."""
        self.counted_BT = mask_BT.bool() & (torch.arange(mask_BT.shape[1]) >= FIRST_POSITION)

    def see(self, site: str, x_BTC: Tensor) -> None:
        x_NC = x_BTC[self.counted_BT].double()
        self.sums[site] = self.sums.get(site, 0.0) + x_NC.square().sum(0)
        self.tokens[site] += len(x_NC)

    def rms(self) -> dict[str, Tensor]:
        """Site -> [C]. ValueError if no token counted."""
        if not all(self.tokens.values()):
            raise ValueError(
                f"equalisation: needs a sequence of more than {FIRST_POSITION} tokens, the first do not count"
            )
        return {site: (total_C / self.tokens[site]).sqrt() for site, total_C in self.sums.items()}


@torch.no_grad()
def equalizing_scales(model: Any, rms: dict[str, Tensor], power: float) -> dict[str, Tensor]:
    """Site -> [C] float32, the s by which its channels are divided: (rms / w)^power, times what leaves the site's mean
    square as it was. Of a value that several heads read, one s for all of them: `o_in` has as many as v_proj outputs.
    """
    scales = {}
    for number, layer in enumerate(decoder_layers(model)):
        for name, readers in READERS.items():
            site = f"layers.{number}.{name}"
            columns: list[Any] = [layer.get_submodule(path).weight for path in readers]
            rms_C, norm_C = rms[site], torch.cat(columns).double().norm(dim=0)
            if name == "o_in":
                rms_C, norm_C = (_over_readers(x_C, layer.self_attn) for x_C in (rms_C, norm_C))
            rms_C, norm_C = (x_C.clamp(min=SMALLEST_SHARE * x_C.mean().clamp(min=1e-30)) for x_C in (rms_C, norm_C))
            scale_C = (rms_C / norm_C) ** power
            scale_C *= ((rms_C / scale_C).square().sum() / rms_C.square().sum()).sqrt()
            scales[site] = scale_C.float()
    return scales


@torch.no_grad()
def equalize(model: Any, scales: dict[str, Tensor]) -> None:
    """Divide the channels of every site by its scales, and multiply what reads them, in place.

    ValueError as in `same_function`, or if the scales are of another model.
    """
    layers = decoder_layers(model)
    with same_function(model, "equalise"):
        makers: dict[str, Any] = {
            f"layers.{i}.{name}": layer.get_submodule(MAKER[name]) for i, layer in enumerate(layers) for name in MAKER
        }
        if {site: len(scale_C) for site, scale_C in scales.items()} != {s: len(m.weight) for s, m in makers.items()}:
            raise ValueError(f"equalisation: the scales are not those of {type(model).__name__}, but of another model")
        for number, layer in enumerate(layers):
            for name in MAKER:
                scale_C, maker = scales[f"layers.{number}.{name}"], makers[f"layers.{number}.{name}"]
                maker.weight.div_(scale_C if maker.weight.ndim == 1 else scale_C[:, None])
                if getattr(maker, "bias", None) is not None:
                    maker.bias.div_(scale_C)
                read_C = _for_heads(scale_C, layer.self_attn) if name == "o_in" else scale_C
                for path in READERS[name]:
                    reader: Any = layer.get_submodule(path)
                    reader.weight.mul_(read_C)
    model.is_equalized = True


def _over_readers(x_C: Tensor, attention: Any) -> Tensor:
    """Root mean square over the query heads that read the same value head."""
    shared = attention.num_key_value_groups
    return x_C.unflatten(0, (-1, shared, attention.head_dim)).square().mean(1).sqrt().flatten()


def _for_heads(scale_C: Tensor, attention: Any) -> Tensor:
    """Repeated for every query head."""
    shared = attention.num_key_value_groups
    return scale_C.unflatten(0, (-1, 1, attention.head_dim)).expand(-1, shared, -1).flatten()
