"""Where in a forward the first number appears that is not finite.

Nothing is watched while all goes well. A number that is not finite stays in its token's residual stream up to the last
hidden state, so that one look at a result tells that there was one; the forward is then made again, watched.

Shapes: B sequences, T tokens, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Place:
    module: str
    """Whose output it is."""
    sequence: int
    """Of the batch."""
    position: int


@contextmanager
def watching_outputs(model: Any, see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Within the block, `see(module, value_BTD)` is called with every output over tokens, in the forward's order."""

    def hook(name: str) -> Any:
        def forward(module: nn.Module, args: tuple, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            if isinstance(value, Tensor) and value.ndim == 3:
                see(name, value)

        return forward

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def first_not_finite(model: Any, forward: Callable[[], Any], mask_BT: Tensor | None = None) -> Place | None:
    """The first module of `model` whose output is not finite while `forward` runs, in its first sequence and token that
    is not; None if all is finite. Only tokens of the mask count.
    """
    found: list[Place] = []

    def see(module: str, value_BTD: Tensor) -> None:
        if found or bool(value_BTD.isfinite().all()):
            return
        bad_BT = ~value_BTD.isfinite().all(-1)
        if mask_BT is not None and bad_BT.shape == mask_BT.shape:
            bad_BT = bad_BT & mask_BT.bool()
        if bad_BT.any():
            sequence, position = bad_BT.nonzero()[0].tolist()
            found.append(Place(module=module, sequence=sequence, position=position))

    with watching_outputs(model, see):
        forward()
    return found[0] if found else None


def require_finite(
    values: Tensor,
    who: str,
    names: Sequence[str],
    model: Any,
    forward: Callable[[], Any],
    mask_BT: Tensor | None = None,
) -> None:
    """ValueError of `who` if `values`, which `forward` gave, are not finite: it names the module that the first such
    number came from, the sequence by its name and the position. `forward` is then made once more.
    """
    if values.isfinite().all():
        return
    place = first_not_finite(model, forward, mask_BT)
    if place is None:
        raise ValueError(f"{who}: results for {', '.join(names[:3])} are not finite, though all activations are")
    raise ValueError(
        f"{who}: the output of {place.module} is not finite, first at position {place.position} of "
        f"{names[place.sequence]}"
    )
