"""Linear layers that multiply low-bit codes with torch's own CPU kernels: a forward that is low-bit in fact, so that
its time and memory can be measured.

`IntegerLinear`: codes of weights and activations lie as int8, every group of a row is one integer product
(`torch._int_mm`), exact in int32, and scales come afterwards: thousands of small products for a token.
`Int4Linear`: codes of weights lie as 4 bits and meet, in one product (`_weight_int4pack_mm_for_cpu`), activations in
bfloat16, which holds their codes exactly, or which are not rounded at all. The kernel rounds a group's scale to
bfloat16; in float32 it is right and many times slower.
Dual-scale activations are two rows of codes, one for each grid, the other's values zero in it.

Shapes: O outputs, I inputs, G groups of a row, S inputs of a group, B batch, T tokens, N tokens of a batch, R rows of
codes (N for one grid, 2 N for two).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from reflux.kernels.dual_scale_quant import largest_code, outlier_scale, quantize

from .low_bit import look_up_scales, site_modules
from .policies import PositionTable
from .quantizers import SMALLEST_SCALE, weight_values

INT4_BITS = 4
INT4_GROUPS = (32, 64, 128, 256)
INT4_OUTPUTS = 16
"""What torch's kernel takes: codes of up to these bits, these group sizes, and outputs in multiples of this."""
INT4_ZERO = 8
"""The kernel's code for zero."""
ROWS_AT_ONCE = 256
"""Of an integer product: its sums are as many matrices as there are groups."""


@dataclass(frozen=True, kw_only=True)
class CodedWeight:
    """A low-bit weight: value = (code − zero point) * scale, both of its group."""

    bits: int
    codes_OI: Tensor
    """int8"""
    scale_OG: Tensor
    """float32"""
    zero_OG: Tensor | None = None
    """int8, codes that stand for zero; None: zero stands for itself."""


@dataclass(frozen=True, kw_only=True)
class CodedRows:
    """What a site's rounding made of its tokens."""

    source_BTI: Tensor
    """The hidden states that were rounded, by which a linear knows that they are its own."""
    codes_RI: Tensor
    """int8"""
    scale_R1: Tensor
    grids: int
    """R / N"""


def coded_rows(x_BTI: Tensor, main_scale_BT1: Tensor | None, bits: int, activation: str) -> CodedRows:
    """Codes of the hidden states on the grids of `activation`, those of quantizers.QUANTIZERS. ValueError for one that
    has no integer form here.
    """
    x_NI = x_BTI.reshape(-1, x_BTI.shape[-1]).float()
    if activation == "plain":
        top = largest_code(bits)
        scale_N1 = (x_NI.abs().amax(-1, keepdim=True) / top).clamp(min=SMALLEST_SCALE)
        codes_NI = (x_NI / scale_N1).round().clamp(-top, top).to(torch.int8)
        return CodedRows(source_BTI=x_BTI, codes_RI=codes_NI, scale_R1=scale_N1, grids=1)
    if activation == "dual":
        assert main_scale_BT1 is not None, "dual-scale quantisation needs the policy's main scale"
        main_N1 = main_scale_BT1.expand(*x_BTI.shape[:-1], 1).reshape(-1, 1).float()
        outlier_N1 = outlier_scale(x_NI, main_N1, bits)
        codes_NI, is_outlier_NI = quantize(x_NI, main_N1, outlier_N1, bits)
        codes_RI = torch.cat([codes_NI.masked_fill(is_outlier_NI, 0), codes_NI.masked_fill(~is_outlier_NI, 0)])
        return CodedRows(source_BTI=x_BTI, codes_RI=codes_RI, scale_R1=torch.cat([main_N1, outlier_N1]), grids=2)
    raise ValueError(f"activation {activation!r}: has no integer kernel, allowed are 'dual' and 'plain'")


class CodedLinear(nn.Module, ABC):
    """A linear layer of low-bit codes. `incoming` is set by its site before each forward; None multiplies the hidden
    states as they are: the path without rounded activations.
    """

    def __init__(self, bias_O: Tensor | None) -> None:
        super().__init__()
        self.bias = None if bias_O is None else nn.Parameter(bias_O.detach(), requires_grad=False)
        self.incoming: CodedRows | None = None

    @abstractmethod
    def of_codes(self, codes_RI: Tensor) -> Tensor:
        """[R, O] float32: activations of scale 1 times the weight."""

    @abstractmethod
    def of_values(self, x: Tensor) -> Tensor:
        """[..., O] hidden states as they are times the weight."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.incoming
        if rows is None:
            y = self.of_values(x)
        elif rows.source_BTI is x:
            y_RO = self.of_codes(rows.codes_RI) * rows.scale_R1
            y = y_RO.reshape(rows.grids, -1, y_RO.shape[-1]).sum(0).reshape(*x.shape[:-1], -1)
        else:
            raise ValueError("low-bit kernels: a block changes its hidden states before its linears read them")
        return (y if self.bias is None else y + self.bias).to(x.dtype)


class IntegerLinear(CodedLinear):
    """Of int8 codes on both sides. Without rounded activations its weight is restored for the moment."""

    codes_GSO: Tensor
    scale_GO: Tensor
    zero_GO: Tensor | None

    def __init__(self, coded: CodedWeight, bias_O: Tensor | None) -> None:
        super().__init__(bias_O)
        outputs, groups = coded.scale_OG.shape
        self.out_features, self.in_features = coded.codes_OI.shape
        codes_OGS = coded.codes_OI.reshape(outputs, groups, -1)
        self.register_buffer("codes_GSO", codes_OGS.permute(1, 2, 0).contiguous())
        self.register_buffer("scale_GO", coded.scale_OG.t().contiguous())
        self.register_buffer("zero_GO", None if coded.zero_OG is None else coded.zero_OG.t().contiguous())

    def group_sums(self, codes_RI: Tensor) -> Tensor:
        """[G, R, O] int32, exact: of every group, the products of codes and steps from zero summed."""
        groups, size, outputs = self.codes_GSO.shape
        codes_GRS = codes_RI.reshape(-1, groups, size).transpose(0, 1).contiguous()
        sums_GRO = torch.empty(groups, len(codes_RI), outputs, dtype=torch.int32)
        for g in range(groups):
            torch._int_mm(codes_GRS[g], self.codes_GSO[g], out=sums_GRO[g])
        if self.zero_GO is not None:  # sum x (q − z) = sum x q − z sum x
            sums_GRO -= codes_GRS.sum(-1, dtype=torch.int32)[..., None] * self.zero_GO[:, None]
        return sums_GRO

    def of_codes(self, codes_RI: Tensor) -> Tensor:
        parts = codes_RI.split(ROWS_AT_ONCE)
        return torch.cat([(self.group_sums(part_RI) * self.scale_GO[:, None]).sum(0) for part_RI in parts])

    def of_values(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype))

    @property
    def weight(self) -> Tensor:
        """[O, I] the restored weight."""
        codes_OI = self.codes_GSO.permute(2, 0, 1).reshape(self.scale_GO.shape[1], -1)
        return weight_values(codes_OI, self.scale_GO.t(), None if self.zero_GO is None else self.zero_GO.t())


class Int4Linear(CodedLinear):
    """Of 4-bit codes, multiplied in `dtype`."""

    packed_OP: Tensor
    scales_GO2: Tensor

    def __init__(self, coded: CodedWeight, bias_O: Tensor | None, dtype: torch.dtype) -> None:
        """ValueError for a weight that torch's kernel does not take."""
        super().__init__(None if bias_O is None else bias_O.to(dtype))
        self.out_features, self.in_features = coded.codes_OI.shape
        self.group_size = self.in_features // coded.scale_OG.shape[1]
        if refusal := int4_refusal(coded.bits, self.group_size, self.out_features):
            raise ValueError(refusal)
        convert = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        self.register_buffer("packed_OP", convert(coded.codes_OI.to(torch.int32) + INT4_ZERO, 1))
        offset_OG = torch.zeros_like(coded.scale_OG) if coded.zero_OG is None else coded.zero_OG * -coded.scale_OG
        scales_GO2 = torch.stack([coded.scale_OG.t(), offset_OG.t()], -1).to(dtype).contiguous()
        self.register_buffer("scales_GO2", scales_GO2)

    def of_codes(self, codes_RI: Tensor) -> Tensor:
        return self.of_values(codes_RI).float()

    def of_values(self, x: Tensor) -> Tensor:
        x_NI = x.reshape(-1, x.shape[-1]).to(self.scales_GO2.dtype)
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        return multiply(x_NI, self.packed_OP, self.group_size, self.scales_GO2).reshape(*x.shape[:-1], -1)


def int4_refusal(bits: int, group_size: int, outputs: int) -> str:
    """Why torch's 4-bit kernel does not take a weight; "" if it does."""
    if bits <= INT4_BITS and group_size in INT4_GROUPS and outputs % INT4_OUTPUTS == 0:
        return ""
    return (
        f"weight_bits {bits}, group_size {group_size}, {outputs} outputs: torch's 4-bit kernel takes up to {INT4_BITS} "
        f"bits, groups of {INT4_GROUPS} and outputs in multiples of {INT4_OUTPUTS}"
    )


class _Coding:
    """Forward pre-hook of a site: rounds its hidden states to codes and hands them to the linears that read them."""

    def __init__(self, model: Any, site: str, linears: list[CodedLinear], bits: int, activation: str) -> None:
        self.model, self.site, self.linears, self.bits, self.activation = model, site, linears, bits, activation

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        rows = None
        if self.model.rounds_activations:
            policy, scales = self.model.policy, self.model.model.main_scales
            main_scale_BT1 = None if policy is None else scales[policy.index[self.site]][..., None]
            x_BTI = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            rows = coded_rows(x_BTI, main_scale_BT1, self.bits, self.activation)
        for linear in self.linears:
            linear.incoming = rows


def use_coded_linears(
    model: Any,
    weights: dict[str, CodedWeight],
    site_bits: dict[str, int],
    activation: str,
    policy: PositionTable | None,
    dtype: torch.dtype,
) -> Any:
    """Replace the linears named in `weights`, by Int4Linears where `dtype` is bfloat16 and the kernel takes them, else
    by IntegerLinears; activations are rounded to `site_bits` at each site. The model itself. ValueError if a linear
    stands in no site, or a site's values do not fit int8.
    """
    sites = site_modules(model)
    for site, bits in site_bits.items():
        if site not in sites or not 2 <= bits <= 8:
            raise ValueError(f"low-bit kernels: site {site!r} of {bits} bits, the model's sites take 2 to 8")
    paths = {site: next(path for path, module in model.named_modules() if module is sites[site]) for site in sites}
    for name, coded in weights.items():
        model.set_submodule(name, _coded_linear(coded, model.get_submodule(name).bias, dtype))
    model.policy, model.rounds_activations = policy, True
    model.model.register_forward_pre_hook(look_up_scales(policy), with_kwargs=True)
    fed: dict[str, list[CodedLinear]] = {site: [] for site in sites}
    for name, linear in model.named_modules():
        holds = [site for site, path in paths.items() if name == path or name.startswith(f"{path}.")]
        innermost = max(holds, key=lambda site: len(paths[site]), default=None)
        if isinstance(linear, CodedLinear):
            if innermost is None:
                raise ValueError(f"low-bit kernels: {name} stands in no block whose activations are rounded")
            fed[innermost].append(linear)
        elif isinstance(linear, nn.Linear) and innermost in site_bits:
            raise ValueError(f"low-bit kernels: {name} has its weight in full precision, what enters it is rounded")
    for site, linears in fed.items():
        if site not in site_bits:
            continue  # its linears multiply what comes as it is
        module = model.get_submodule(paths[site])
        module.register_forward_pre_hook(_Coding(model, site, linears, site_bits[site], activation), with_kwargs=True)
    return model


def _coded_linear(coded: CodedWeight, bias_O: Tensor | None, dtype: torch.dtype) -> CodedLinear:
    (outputs, inputs), groups = coded.codes_OI.shape, coded.scale_OG.shape[1]
    if dtype == torch.bfloat16 and not int4_refusal(coded.bits, inputs // groups, outputs):
        return Int4Linear(coded, bias_O, dtype)
    return IntegerLinear(coded, bias_O)


def use_int4_kernels(model: Any, weights: dict[str, CodedWeight], dtype: torch.dtype = torch.bfloat16) -> Any:
    """Replace the linears named in `weights` by Int4Linears and everything else by its value in `dtype`; the model
    itself, whose activations are not rounded. ValueError for a weight that the kernel does not take.
    """
    for name, coded in weights.items():
        model.set_submodule(name, Int4Linear(coded, model.get_submodule(name).bias, dtype))
    for parameter in model.parameters():  # not the buffers: RoPE's frequencies stay in float32
        parameter.data = parameter.data.to(dtype)
    model.policy, model.rounds_activations = None, True
    return model
