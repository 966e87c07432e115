"""A training that begins with the codes of somebody else's checkpoint: GPTQ, AWQ or AutoRound have chosen the weights'
codes, and what is trained is a student of that very grid whose activations are rounded too.

Given is a model in Hugging Face layout whose decoder linears compressed-tensors has packed, as llm-compressor writes
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from reflux.components.algorithms.code_cells import begin_at_codes
from reflux.components.algorithms.layer_bits import FULL_PRECISION, TERNARY, bits_of
from reflux.components.algorithms.low_bit import LowBitLinear, Scheme
from reflux.components.algorithms.low_bit_embedding import tables
from reflux.components.bundles.packed_linear import BESIDE, PACKED, WORD_BITS, coded_linear
from reflux.components.bundles.stored_scheme import packed_as


@dataclass(frozen=True, kw_only=True)
class PackedStart:
    """A checkpoint whose codes are begun with. It has no position table: that of the profile is taken."""

    folder: Path
    scheme: Scheme

    def policy(self) -> None:
        return None

    def load_into(self, model: Any, base: str) -> None:
        """Its codes, scales, zero points and norms, into a model under the scheme.

        Where norms are the student's own, so are the master weights as far as the codes allow; a method that has moved
        norms (AWQ) has scaled weights too, which then begin at the values of their codes. ValueError if the checkpoint
        is of another model.
        """
        with _opened(self.folder) as tensors:
            low_bit = {name: m for name, m in model.named_modules() if isinstance(m, LowBitLinear)}
            stems = {name.removesuffix(PACKED) for name in tensors if name.endswith(PACKED)}
            if differing := sorted(stems ^ low_bit.keys()):
                where = "packed there and not rounded" if differing[0] in stems else "rounded and not packed there"
                raise ValueError(f"start_uri {self.folder}: {differing[0]} of {base} is {where}")
            own, fixed = model.state_dict(), set()
            if self.scheme.rounds_embedding:
                fixed = {f"{name}.weight" for name in tables(model)}  # rounded already
            moved = set()
            for name in sorted(tensors.keys() - fixed):
                if name.endswith((PACKED, *BESIDE)):
                    continue
                if name not in own or tensors[name].get_tensor(name).shape != own[name].shape:
                    raise ValueError(f"start_uri {self.folder}: {name} is no weight of {base}, or of another shape")
                value = tensors[name].get_tensor(name).to(own[name].dtype)
                if not torch.equal(value, own[name]):
                    moved.add(name)
                    own[name].copy_(value)
            if elsewhere := sorted(name for name in moved if ".layers." not in name):
                raise ValueError(
                    f"start_uri {self.folder}: {elsewhere[0]} is not the student's; a training moves the layers alone"
                )
            for name, linear in low_bit.items():
                zero_point = f"{name}.weight_zero_point"
                entry = {"bits": linear.bits, "zero_point": zero_point if zero_point in tensors else 0}
                try:
                    coded = coded_linear(tensors[f"{name}{PACKED}"], name, entry)
                    begin_at_codes(linear, coded, near_weight=not moved)
                except ValueError as error:
                    raise ValueError(f"start_uri {self.folder}: {name}: {error}") from None


def packed_start(folder: Path, scheme: Scheme, *, equalized: bool) -> PackedStart:
    """The checkpoint in `folder` for a training under `scheme`. ValueError, before any code is read, if it is none, its
    weights lie on other grids, or the student's channels are equalised, which no checkpoint's are.
    """
    if packed_as(folder) is None:
        raise ValueError(
            f"start_uri {folder}: is a model in full precision, which is a student; a training begins with an earlier "
            "distill or with codes of compressed-tensors"
        )
    if equalized:
        raise ValueError(
            f"start_uri {folder}: its weights are not rescaled as the profile's are; take "
            "profile_kv.equalization_power=0"
        )
    if scheme.rotates:
        raise ValueError(f"start_uri {folder}: its weights are not turned, rotation {scheme.rotation!r}; take 'none'")
    with _opened(folder) as tensors:
        for name in sorted(name for name in tensors if name.endswith(PACKED)):
            try:
                _require_same_grid(tensors, name.removesuffix(PACKED), scheme)
            except ValueError as error:
                raise ValueError(f"start_uri {folder}: {name.removesuffix(PACKED)}: {error}") from None
    return PackedStart(folder=folder, scheme=scheme)


def _require_same_grid(tensors: dict[str, Any], stem: str, scheme: Scheme) -> None:
    """By the tensors' shapes: of a checkpoint elsewhere only headers are here before a run."""
    bits = bits_of(stem[stem.find("layers.") :], scheme.weight_bits, scheme.exceptions)
    if bits in (FULL_PRECISION, TERNARY):
        raise ValueError(f"the student's is {'ternary' if bits == TERNARY else 'in full precision'}")
    file = tensors[f"{stem}{PACKED}"]
    words, groups = (file.get_slice(f"{stem}{end}").get_shape()[1] for end in (PACKED, ".weight_scale"))
    if words != -(-groups * scheme.group_size * bits // WORD_BITS):
        raise ValueError(
            f"its rows have {words} words of codes in {groups} groups, which are not the student's {bits} bits in "
            f"groups of {scheme.group_size}"
        )
    if f"{stem}.weight_g_idx" in tensors:
        raise ValueError("its groups are in another order (weight_g_idx, actorder); groups of neighbours are allowed")
    if f"{stem}.weight_zero_point" in tensors and not scheme.has_zero_points(bits):
        raise ValueError("its groups have zero points; take distill.weight_zero_points=true")


@contextmanager
def _opened(folder: Path) -> Iterator[dict[str, Any]]:
    """Name of each tensor -> the open file that has it. ValueError for a file that cannot be read."""
    with ExitStack() as stack:
        tensors: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"start_uri {path}: cannot be read as safetensors ({error})") from error
            tensors |= dict.fromkeys(file.keys(), file)
        yield tensors
